"""Make a case's checkpoint, ask `check` and the engines, and compare."""

import io
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from fp8calib.cli import main_inner
from fp8calib.errors import Fp8CalibError
from fp8calib.plugins.vllm.loader import LoaderAnswer
from tests.real_engines.fuzz.architectures import save_model
from tests.real_engines.fuzz.compare import (
    Finding,
    Kind,
    Observation,
    compare,
    find_exclusion,
    find_refusal,
)
from tests.real_engines.fuzz.draft import UnfitError
from tests.real_engines.fuzz.draw import DAMAGES, Case
from tests.real_engines.fuzz.engines import find_index, list_tensors
from tests.real_engines.fuzz.forms import FORMS
from tests.real_engines.vllm_job import PYTHON, ForkServer

Observe = Callable[[Case, Path, Path], Observation | None]
"""From the case, its checkpoint, and the model before it was quantized, in bfloat16."""
Observers = Mapping[str, Observe]
RUN_IN_CHECK = "vllm-run"
"""Compares `vllm check` with a whole load in vLLM."""
_RELEASES = dict.fromkeys(("vllm", RUN_IN_CHECK), "vllm==0.32")
"""What `check` is asked about: the release that is run, where it is not the default."""
_MOST_NUMBERS = 64
"""A tensor with more is no KV scale."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What came of one case."""

    case: Case
    findings: dict[str, Finding] = field(default_factory=dict)
    """By engine."""
    agreed: list[str] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    """By engine, why nothing is compared."""
    unwritten: str = ""
    """Why there is no such checkpoint; empty where there is."""


class Evaluator:
    """Makes checkpoints in a folder, and asks about them."""

    def __init__(
        self, folder: Path, observers: Observers, server: ForkServer | None = None
    ) -> None:
        self._folder = folder
        self._server = server
        self._observers = observers
        self._count = 0

    def __call__(self, case: Case) -> Result:
        """Compare what `check` says of a case with what the engines do."""
        self._count += 1
        result = Result(case=case)
        out = self._folder / f"{self._count}"
        try:
            write(case, self._save_model(case), out)
        except (UnfitError, Fp8CalibError) as error:
            result.unwritten = f"{type(error).__name__}: {error}"
            return result
        for engine in self._observers:
            self._compare(result, engine, out)
        shutil.rmtree(out)
        return result

    def _compare(self, result: Result, engine: str, out: Path) -> None:
        original = self._save_model(replace(result.case, dtype="bfloat16"))
        seen = self._observers[engine](result.case, out, original)
        if seen is None:
            return
        has_kv = FORMS[result.case.form].has_kv
        found = judge(lambda: self._ask_check(out, engine), engine, seen, out, has_kv=has_kv)
        if isinstance(found, Finding):
            result.findings[engine] = found
        elif found:
            result.excluded[engine] = found
        else:
            result.agreed.append(engine)

    def _ask_check(self, out: Path, engine: str) -> Mapping[str, Any]:
        if engine != RUN_IN_CHECK:
            return ask_check(out, engine)
        with mock.patch("fp8calib.plugins.vllm.loader.ask_loader", self._ask_loader):
            return ask_check(out, "", "--python", str(PYTHON), command=("vllm", "check"))

    def _ask_loader(self, model: Path, *_: object, has_kv: bool, **__: object) -> LoaderAnswer:
        """Answer for `ask_loader` of the product, which starts a process for each question."""
        assert self._server is not None
        return self._server.run(model, self._folder / "run.json", "fp8" if has_kv else "auto")

    def _save_model(self, case: Case) -> Path:
        folder = self._folder / f"{case.architecture}-{case.dtype}-{case.layers}"
        if not folder.exists():
            changes = {"num_hidden_layers": case.layers} if case.layers else {}
            save_model(case.architecture, folder, case.dtype, **changes)
        return folder


def judge(
    ask: Callable[[], Mapping[str, Any]], engine: str, seen: Observation, out: Path, *, has_kv: bool
) -> Finding | str:
    """Compare what `check` says of a checkpoint with what was seen; or say why it is not compared.

    Empty where they agree.
    """
    if why := find_exclusion(engine, seen.error):
        return why
    try:
        report = ask()
    except Exception as error:  # noqa: BLE001 -- a defect, which is a finding
        said = f"{type(error).__name__}: {error}"
        return Finding(kind=Kind.CRASH, check=said, engine=seen.error)
    if report["unknown"] and not find_refusal(report):
        return "check says that it cannot tell"
    return compare(report, seen, list_stored(out), has_kv=has_kv) or ""


def write(case: Case, original: Path, out: Path) -> None:
    """Write a case's checkpoint.

    Raises:
        UnfitError: a damage needs what the checkpoint does not have.
        Fp8CalibError: the program does not write this form for this model.
    """
    random = Random(case.seed)  # noqa: S311 -- a test needs no secrecy
    written = out.with_suffix(".written")
    try:
        draft = FORMS[case.form].write(original, written, random)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    for number, name in enumerate(case.damages):
        try:
            DAMAGES[name].change(draft)
        except (LookupError, RuntimeError, StopIteration, TypeError) as error:
            if not number:
                raise
            raise UnfitError(f"{name} cannot be done after {case.damages[0]}") from error
    draft.save(out)


def ask_check(
    folder: Path, engine: str, *options: str, command: tuple[str, ...] = ("check",)
) -> Mapping[str, Any]:
    """Give what `fp8calib check --json` prints; a checkpoint it does not open is refused."""
    with redirect_stdout(io.StringIO()) as printed:
        try:
            asked = ("--engine", _RELEASES.get(engine, engine)) if engine else ()
            main_inner([*command, str(folder), *asked, "--json", *options])
        except Fp8CalibError as error:
            refused = {"status": "refused", "value": None, "why": f"check stops: {error}"}
            said = {"layers": [], "problems": [], "weights": refused}
            return {"ok": False, "unknown": [], **said}
    report: Mapping[str, Any]
    (report,) = json.loads(printed.getvalue())["engines"].values()
    return report


def list_stored(folder: Path) -> dict[int, set[float]]:
    """List the numbers of small tensors in a checkpoint, by the first number in their names."""
    found: dict[int, set[float]] = defaultdict(set)
    for name, tensor in list_tensors(folder):
        index = find_index(name)
        if index is not None and tensor.numel() <= _MOST_NUMBERS:
            found[index] |= set(tensor.float().flatten().tolist())
    return found
