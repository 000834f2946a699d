"""Ask vLLM's own loader about a folder, in an environment that has vLLM.

Where the loader and the replay differ, the loader counts, and the report says so.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Status,
    judge_number,
    report_refusal,
)
from fp8calib.errors import UsageError, VerificationError
from fp8calib.geometry.model_geometry import ModelGeometry

_SCRIPT = Path(__file__).with_name("run_loader.py")
_TIMEOUT_S = 300
_OF_THE_BUILD = ("cpu", "kernel", "cuda", "triton", "device", "backend", "platform")
"""Words of errors that a build for another device would not raise."""
_FIX = "the reason is vLLM's own error: write the checkpoint or its config again"
_ENVIRONMENT_HINT = "name a Python with vLLM: --engine-python PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAnswer:
    """What vLLM's loader did with a folder."""

    version: str
    stage: str
    """Where it stopped: import, config, model, weights or scales; `done` where it loaded."""
    error: str
    missing: tuple[str, ...]
    """Weights and biases that no tensor filled."""
    files: tuple[str, ...]
    """The files that vLLM opened."""
    scales: Mapping[str, Mapping[str, tuple[float, ...]]]
    """By attention module: the numbers that K and V are multiplied by."""

    @property
    def is_of_the_build(self) -> bool:
        """Whether the error may come from vLLM's build for CPU, and not from the file."""
        return any(word in self.error.lower() for word in _OF_THE_BUILD)


def ask_loader(path: Path, python: Path, *, has_kv: bool) -> LoaderAnswer:
    """Load a folder with the vLLM of an environment.

    Args:
        path: the checkpoint.
        python: the interpreter of the environment.
        has_kv: whether the KV cache is FP8.

    Raises:
        UsageError: the environment has no vLLM.
        VerificationError: the child process died or did not end.
    """
    command = [str(python), "-I", str(_SCRIPT), str(path.resolve()), "fp8" if has_kv else "auto"]
    try:
        done = subprocess.run(  # noqa: S603 -- the interpreter that the user names
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerificationError(f"{python}: {error}", hint=_ENVIRONMENT_HINT) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"stage"')]
    if not lines:
        tail = " ".join(done.stderr.split())[-400:]
        raise VerificationError(
            f"{python}: vLLM's loader ended with {done.returncode}: {tail}", hint=_ENVIRONMENT_HINT
        )
    answer = json.loads(lines[-1])
    if answer["stage"] == "import":
        raise UsageError(f"{python}: {answer['error']}", hint=_ENVIRONMENT_HINT)
    return LoaderAnswer(
        version=answer["version"],
        stage=answer["stage"],
        error=answer["error"],
        missing=tuple(answer.get("missing", ())),
        files=tuple(answer["files"]),
        scales={
            module: {role: tuple(map(float, numbers)) for role, numbers in each.items()}
            for module, each in answer.get("scales", {}).items()
        },
    )


def amend_by_loader(
    report: EngineReport, answer: LoaderAnswer, geometry: ModelGeometry
) -> EngineReport:
    """Replace what the replay says by what the loader did."""
    if answer.error and answer.is_of_the_build:
        why = f"vLLM {answer.version} for CPU stops at the {answer.stage}: {answer.error}"
        return report.doubt(f"{why}. Another build may load it: the report is that of the replay")
    if answer.error:
        return _report_error(report, answer, geometry)
    amended = report.model_copy(update={"unknown": ()})
    if report.weights is not None and report.weights.status is Status.REFUSED:
        amended = amended.model_copy(update={"weights": None}).add_problems(
            f"the replay expected a refusal ({report.weights.why}), but vLLM {answer.version} "
            "loads it: a defect of the replay"
        )
    if answer.missing and report.weights is None:
        why = f"vLLM fills {len(answer.missing)} weights with nothing, such as {answer.missing[0]}"
        verdict = LoadVerdict(status=Status.MISREAD, why=why, fix="complete the checkpoint")
        amended = amended.model_copy(update={"weights": verdict})
    layers = tuple(_amend_layer(layer, answer) for layer in report.layers)
    return amended.model_copy(update={"layers": layers}).add_problems(
        f"vLLM {answer.version} loaded it, from {', '.join(answer.files) or 'no safetensors file'}",
        *_list_differences(report.layers, layers),
    )


def _report_error(
    report: EngineReport, answer: LoaderAnswer, geometry: ModelGeometry
) -> EngineReport:
    why = f"vLLM {answer.version} stops at the {answer.stage}: {answer.error}"
    refused = report_refusal(geometry, Refusal(why, fix=_FIX))
    verdict = LoadVerdict(status=Status.REFUSED, why=why, fix=_FIX)
    was_refused = any(layer.k.status is Status.REFUSED for layer in report.layers)
    defect = "the replay expected vLLM to load it: a defect of the replay"
    notes = () if was_refused or report.unknown else (defect,)
    return refused.model_copy(
        update={"weights": verdict, "asks_for_kv": report.asks_for_kv}
    ).add_problems(*notes)


def _amend_layer(layer: LayerVerdict, answer: LoaderAnswer) -> LayerVerdict:
    held = next(
        (each for module, each in answer.scales.items() if layer.layer in _list_indices(module)),
        None,
    )
    if held is None:
        is_unknown = layer.k.status is Status.UNKNOWN
        return LayerVerdict(layer=layer.layer, k=_UNSCALED, v=_UNSCALED) if is_unknown else layer
    return LayerVerdict(
        layer=layer.layer,
        k=_amend_verdict(layer.k, max(held["k"])),
        v=_amend_verdict(layer.v, max(held["v"])),
    )


_UNSCALED = LoadVerdict(
    status=Status.DEFAULTED, value=1.0, why="vLLM's own loader has no scale for this layer"
)


def _list_indices(module: str) -> list[int]:
    """List the numbers in a module's path; the first is that of its layer."""
    return [int(part) for part in module.split(".") if part.isdigit()][:1]


def _amend_verdict(verdict: LoadVerdict, held: float) -> LoadVerdict:
    is_agreed = verdict.status not in (Status.REFUSED, Status.UNKNOWN) and (
        verdict.value is None or math.isclose(verdict.value, held, rel_tol=1e-3)
    )
    if is_agreed:
        return verdict
    if held == 1.0:
        why = "vLLM's own loader leaves the scale at 1.0"
        return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=verdict.fix)
    return judge_number(held, "vLLM's own loader holds it")


def _list_differences(
    replayed: tuple[LayerVerdict, ...], loaded: tuple[LayerVerdict, ...]
) -> Iterator[str]:
    for before, after in zip(replayed, loaded, strict=True):
        if before != after and before.k.status is not Status.UNKNOWN:
            yield (
                f"the replay expected {before.k.status} and {before.v.status} for k and v of layer "
                f"{before.layer}, the loader has {after.k.status} and {after.v.status}: a defect "
                "of the replay"
            )
            return
