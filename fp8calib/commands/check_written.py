"""What engines do with a checkpoint that a command has written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.commands.card import write_card
from fp8calib.commands.check import CheckRequest
from fp8calib.commands.check_run import replay_path
from fp8calib.commands.options import Model
from fp8calib.commands.result import WrittenCheck
from fp8calib.engines.registry import DEFAULT_ENGINES, find_replayed
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.status import Status
from fp8calib.errors import ExportError, Fp8CalibError, name_ranges
from fp8calib.formats.registry import find_dialect
from fp8calib.model.geometry import ModelGeometry

if TYPE_CHECKING:  # only named
    from fp8calib.calibration.calibration_stats import RunStats
    from fp8calib.formats.quantized_model import QuantizedModel

_NO_OVERLAY = ("tgi",)
"""Formats whose folders no engine of `check` loads."""
_WITH_PLACE = ("compressed-tensors", "autofp8", "modelopt", "quark")
_SERVE_PLAIN = "serve the quantized checkpoint as it is; with an FP8 cache these servers use 1.0"
_OTHER_METHODS = (
    "vLLM and SGLang have a place for them beside compressed-tensors (which also stores INT4 and "
    "INT8 weights), fp8, ModelOpt and Quark: use a checkpoint in one of these, or the unquantized "
    "model"
)


def require_server(written: Path, geometry: ModelGeometry, quantized: QuantizedModel) -> None:
    """Refuse a quantized checkpoint with KV scales that no server would use.

    One of the default engines has to use the scales of every layer. Whether it loads the weights is
    not asked.
    """
    folder = open_folder(written)
    faults: dict[str, str] = {}
    for engine in map(find_replayed, DEFAULT_ENGINES):
        assert engine.replay_folder is not None  # noqa: S101 -- the default engines have one
        try:
            slots = engine.replay_folder(folder, geometry, 1).slots.values()
        except Refusal as refusal:
            faults[engine.release] = refusal.why
            continue
        unused = [each.why for each in slots if each.status is not Status.USED]
        if not unused:
            return
        faults[engine.release] = unused[0]
    reasons = "; ".join(f"{title}: {why}" for title, why in faults.items())
    has_place = quantized.dialect is not None and quantized.dialect.name in _WITH_PLACE
    raise ExportError(
        f"{quantized.source.folder}: no server uses KV scales beside quant_method "
        f"{quantized.method} in this model: {reasons}",
        hint=_SERVE_PLAIN if has_place else _OTHER_METHODS,
    )


def finish_formats(
    names: Iterable[str], written: Path, target: Path, model: Model, **more: Any
) -> tuple[WrittenCheck, ...]:
    """Finish the checkpoints among written formats: `finish_checkpoint` of each."""
    checkpoints = [dialect for dialect in map(find_dialect, names) if dialect.needs_model]
    return tuple(
        check
        for each in checkpoints
        for check in finish_checkpoint(
            *(written, target, each.name, model), path=each.path(), **more
        )
    )


def finish_checkpoint(
    written: Path,
    target: Path,
    scheme: str,
    model: Model,
    *,
    path: str = ".",
    revision: str | None = None,
    check: bool = True,
    plain_caches: Sequence[int] = (),
    stats: RunStats | None = None,
) -> tuple[WrittenCheck, ...]:
    """Check a written checkpoint as `check` does, and write its card.

    It is at `path` in the output folder, which is `written` now and will be `target`. Without
    `check` no engine is asked. `plain_caches` are the layers whose KV cache stays in 16 bits, and
    `stats` are those that `check --stats` gets.
    """
    asks, why_unknown, checked = check and path not in _NO_OVERLAY, "", list[WrittenCheck]()
    try:
        found = replay_path(CheckRequest(written / path, stats=stats)) if asks else {}
    except Fp8CalibError as error:
        found, why_unknown = {}, error.message
    for engine in map(find_replayed, DEFAULT_ENGINES if asks else ()):
        report, command = found.get(engine.key), ""
        verdict = report.verdict if report else "unknown"
        summary = f"{verdict}: {report.fault if report else why_unknown}"
        if report and plain_caches and not engine.skip_flag:
            verdict = "not ok" if report.ok else report.verdict
            layers = name_ranges(plain_caches)
            summary = f"{verdict}: it cannot leave the KV cache of {layers} in 16 bits"
        elif report and report.ok:
            summary = report.summary
            command = engine.spell_launch(
                str(target / path), has_kv=report.asks_for_kv, plain_caches=plain_caches
            )
        checked.append(
            WrittenCheck(
                path=path,
                engine=engine.release,
                verdict=verdict,
                summary=summary,
                command=command,
            )
        )
    commands = [each.command for each in checked if each.command]
    name = (target / path).resolve().name
    write_card(written / path, name, scheme, model, revision=revision, commands=commands)
    return tuple(checked)
