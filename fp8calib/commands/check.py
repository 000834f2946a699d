"""Report what each engine will do with scales and FP8 weights, without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, replace
from functools import partial
from itertools import product
from pathlib import Path

from pydantic import Field, computed_field

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import Result
from fp8calib.engines.registry import DEFAULT_ENGINES, find_replayed, list_replayed
from fp8calib.engines.replay.verdicts import EngineReport, LoadVerdict, Reports
from fp8calib.engines.status import Status
from fp8calib.errors import CANNOT_TELL, VerificationError, format_ranges
from fp8calib.text import Block, Line, Table

_NUMBER = re.compile(r"\d[\d.,e+-]*")
"""The number of a layer in the name of its tensor, or of a file."""
_SUSPICIOUS_FIX = (
    "quantize or calibrate the unquantized model again; --allow-suspicious accepts them as they are"
)


def _check_engines(names: str) -> None:
    for name in names.split(","):
        find_replayed(name.strip())


@request_class
class CheckRequest:
    """Report what each engine will do with KV scales and FP8 weights, without running it.

    Exit code 0 only if every layer gets the scales that the file means; 8 if one does not, 9 if
    nothing is wrong but something is unknown. A checkpoint without KV scales that asks for none is
    ok, unless --require-kv is given.

    Example: fp8calib check out/kv-overlay --engine vllm
    """

    path: str | Path = option(
        "PATH",
        "A checkpoint folder or hub id, or a JSON file of any tool.",
        reads=Path,
        check=partial(shared.require_input, hint="name a checkpoint folder or a JSON file"),
    )
    _: KW_ONLY
    engine: str | Sequence[str] | None = option(
        "--engine NAME[==VERSION]",
        f"{', '.join(list_replayed())}; default {', '.join(DEFAULT_ENGINES)}.",
        reads=list[str],
        check=_check_engines,
        default=None,
    )
    tp: int = option("--tp N", "Tensor-parallel degree; default 1.", least=1, default=1)
    model: str | Path | None = option(
        "--model MODEL",
        "The model the scales are for; for files.",
        reads=str,
        check=find_local_model,
        default=None,
    )
    require_kv: bool = option(
        "--require-kv", "Fail if the checkpoint has no KV scales and asks for none.", default=False
    )
    read_weights: bool = option(
        "--read-weights",
        "Read all values: NaN, infinities, rows of zeros, what K and V may reach.",
        default=False,
    )
    allow_suspicious: bool = option(
        "--allow-suspicious",
        "Accept scales that are most likely wrong, such as one 1000 times the median.",
        default=False,
    )
    everything: bool = option(
        "--all", "Print scales that are used, and a fingerprint, too.", default=False
    )
    stats: shared.Stats | None = option(
        "--stats FILE",
        "What calibrate measured: scales that are far from it fail, such as reciprocals.",
        reads=Path,
        check=shared.check_stats,
        default=None,
    )
    revision: str | None = option(shared.REVISION, default=None)


class CheckResult(Result):
    """One report for each engine that was asked for."""

    engines: Reports
    has_read_weights: bool = Field(default=False, exclude=True)
    """Whether all tensors were read."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether the report of every engine is ok."""
        return self.verdict == "ok"

    @property
    def answer(self) -> str:
        """What each engine does."""
        return "; ".join(f"{each.engine}: {each.summary}" for each in self.engines.values())

    @property
    def verdict(self) -> str:
        """`ok`, `not ok`, or `unknown` where only what cannot be judged keeps it from being ok."""
        faults = {each.status for each in self.engines.values() if not each.ok}
        if faults == {Status.UNKNOWN}:
            return Status.UNKNOWN
        return "ok" if self.engines and not faults else "not ok"

    @property
    def exit_code(self) -> int:
        """8 unless every engine is ok; 9 if only what cannot be judged keeps them from it."""
        codes = {"ok": 0, Status.UNKNOWN: CANNOT_TELL}
        return codes.get(self.verdict, VerificationError.exit_code)


def run(request: CheckRequest, reporter: Reporter) -> CheckResult:
    """Replay the loading rules of engines on scales or a checkpoint.

    Raises:
        UsageError: the path or an engine does not exist, or `model` is missing.
        ModelError: the model or the file cannot be read, or the file has no KV scales, or the
            scales are of another model.
    """
    with slow_imports():
        from fp8calib.checkpoint.hub import open_by_range
        from fp8calib.commands.check_run import check_path
    with open_by_range(
        Path(request.path), request.revision, reads_all=request.read_weights, say=reporter.say
    ) as path:
        reports = check_path(replace(request, path=path), reporter)
    return CheckResult(engines=reports, has_read_weights=request.read_weights)


def describe(result: CheckResult, request: CheckRequest) -> Iterator[Block]:
    """Give the verdict, what each engine does otherwise than use the scales, and the fixes."""
    # The requests of plug-ins, which ask the engine itself, lack the option: all is printed.
    is_full = getattr(request, "everything", True)
    fixes: dict[str, list[str]] = {}
    yield Line(f"{request.path}: {result.verdict}")
    for engine in result.engines.values():
        title = f"{engine.engine} {engine.version}: {engine.summary}"
        is_used = all(each.status is Status.USED for each in engine.slots.values())
        if engine.loads_without_kv or (is_used and not (is_full and engine.layers)):
            yield Line(title)
        else:
            columns = ["layers", "", "what", "value", "why"]
            yield Table(title=title, columns=columns, rows=_rows(engine, is_full=is_full))
        if is_full and engine.fingerprint and not engine.loads_without_kv:
            yield Line(f"  KV scales as loaded: fingerprint {engine.fingerprint}")
        if engine.linears is not None and (is_full or engine.linears.unknown):
            count = engine.linears
            yield Line(f"  linears: {count.judged} judged, {count.unknown} unknown")
        if engine.weights is not None:
            yield Line(f"  weights {engine.weights.status}: {engine.weights.why}")
        for fix in _list_fixes(engine):
            fixes.setdefault(fix, []).append(engine.engine)
        yield from (Line(f"  unknown: {reason}") for reason in engine.unknown)
        yield from (Line(f"  suspicious: {reason}") for reason in engine.suspicious)
        yield from (Line(f"  note: {problem}") for problem in engine.problems)
    for fix, names in fixes.items():
        is_for_all = len(names) == len(result.engines)
        yield Line(f"fix: {fix}" if is_for_all else f"fix for {' and '.join(names)}: {fix}")
    if left := list(_list_unjudged(result, request)):
        what, options = zip(*left, strict=True)
        values = f"the values of {' and of '.join(what)}"
        yield Line(f"not judged: {values}; add {' '.join(options)}")


def _list_unjudged(result: CheckResult, request: CheckRequest) -> Iterator[tuple[str, str]]:
    """Name what other options would judge, and these options; plug-ins have none of them."""
    if not isinstance(request, CheckRequest):
        return
    if not (result.has_read_weights or Path(request.path).is_file()):
        yield "weights", "--read-weights"
    verdicts = (each for engine in result.engines.values() for each in engine.slots.values())
    has_used = any(each.status is Status.USED for each in verdicts)
    has_linears = any(each.linears for each in result.engines.values())
    if request.stats is None and (has_used or has_linears):
        # `calibrate` writes them beside the overlay
        beside = Path(request.path).parent / "stats.safetensors"
        stats = shlex.quote(str(beside)) if beside.is_file() else "STATS"
        yield "scales", f"--stats {stats}"


def _rows(engine: EngineReport, *, is_full: bool) -> list[list[str]]:
    """List what happens to scales, by layers; scales that are used only in full."""
    groups: dict[tuple[str, str, str], dict[int, LoadVerdict]] = {}
    for role, layer in product(("k", "v"), engine.layers):
        verdict: LoadVerdict = getattr(layer, role)
        is_used = verdict.status is Status.USED
        if is_full or not is_used:  # reasons may differ in numbers
            why = "" if is_used else _NUMBER.sub("#", verdict.why)
            groups.setdefault((role, verdict.status, why), {})[layer.layer] = verdict
    roles: dict[tuple[str, ...], list[str]] = {}
    for (role, status, _), verdicts in groups.items():
        numbers = sorted(each.value for each in verdicts.values() if each.value is not None)
        ends = dict.fromkeys(f"{number:.6g}" for number in (*numbers[:1], *numbers[-1:]))
        why = next(iter(verdicts.values())).why
        row = (format_ranges(list(verdicts)), status, " to ".join(ends) or "-", why)
        roles.setdefault(row, []).append(role)
    return [[where, ", ".join(names), *rest] for (where, *rest), names in roles.items()]


def _list_fixes(engine: EngineReport) -> list[str]:
    if engine.loads_without_kv:
        return [engine.weights.fix] if engine.weights is not None and engine.weights.fix else []
    verdicts = [*engine.slots.values(), *([engine.weights] if engine.weights is not None else [])]
    fixes = [verdict.fix for verdict in verdicts if verdict.fix]
    return list(dict.fromkeys([*fixes, *[_SUSPICIOUS_FIX] * bool(engine.suspicious)]))


check = as_function("check", CheckRequest, run)
