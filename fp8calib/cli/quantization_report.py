"""The report of a quantization, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fp8calib.checkpoint.atomic import format_size
from fp8calib.cli.console import list_top_level, print_json, print_text, warn
from fp8calib.cli.serving import describe_serving, read_replayed_geometry
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.serving import Serving, find_checkpoint_serving
from fp8calib.errors import ModelError, VerificationError, cut_list, shorten
from fp8calib.fp8.schemes import GPTQ
from fp8calib.geometry.kv_bytes import estimate_kv_bytes, kv_bytes_per_token
from fp8calib.quantization.gptq.core import DAMPING
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.quantize import Written
from fp8calib.quantization.rounded_codes import RoundedLinear
from fp8calib.stats.calibration_stats import CalibrationStats

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOutcome:
    """The plan of a quantization and what came of it."""

    plan: QuantizePlan
    written: Written
    folder: Path
    """Where the checkpoint is now."""
    out: Path
    """Where it will be."""
    source_bytes: int
    duration_s: float
    stats: CalibrationStats | None
    notes: tuple[str, ...]
    rounded: Sequence[RoundedLinear] = ()
    """How each linear was rounded, if not all to nearest."""


def build_quantization_report(outcome: QuantizationOutcome) -> dict[str, Any]:
    """Build the report of a written checkpoint: the output of --json."""
    plan, out = outcome.plan, outcome.out
    serving, why_none = _find_serving(outcome)
    stats = outcome.stats if plan.has_kv else None
    size = kv_bytes_per_token(stats.geometry) if stats else estimate_kv_bytes(plan.config)
    return {
        "out": str(out),
        "files": list(outcome.written.files),
        "scheme": plan.settings.scheme.name,
        "format": plan.settings.dialect.name,
        "bytes": {
            "before": outcome.source_bytes,
            "after": sum(shard.data_bytes for shard in plan.shards),
        },
        "duration_s": outcome.duration_s,
        "resumed": list(outcome.written.resumed),
        "quantized": [matrix.module for matrix in plan.selection.quantized],
        "left": [{"module": item.module, "why": item.why} for item in plan.selection.unquantized],
        "dead": [asdict(item) for item in outcome.written.all_zero],
        "rounded": [asdict(item) for item in outcome.rounded],
        "has_kv_scales": plan.has_kv,
        "notes": [
            *outcome.notes,
            *([f"no command can be given to serve it: {why_none}"] if why_none else []),
            *(f"{name}: not copied: {why}" for name, why in plan.skipped.items()),
        ],
        "kv_bytes_per_token": None
        if size is None or why_none
        else {"before": size[0], "after": size[1]},
        "serving": [asdict(item) for item in serving.commands],
        "limitations": [asdict(item) for item in serving.limitations],
        "other_engines": [asdict(item) for item in serving.others],
    }


def _find_serving(outcome: QuantizationOutcome) -> tuple[Serving, str]:
    """Find who serves the checkpoint, or say why that is not known."""
    try:
        folder = open_folder(outcome.folder)
        geometry, is_foreign = read_replayed_geometry(folder)
    except (ModelError, VerificationError) as error:
        return Serving(commands=(), limitations=(), others=()), error.message
    has_kv = outcome.plan.has_kv
    serving = find_checkpoint_serving(
        folder, outcome.out, geometry, has_kv=has_kv, is_foreign=is_foreign
    )
    return serving, ""


def show_quantization_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a report, as JSON or as text."""
    for note in report["notes"]:
        warn(note)
    for item in report["dead"]:
        name, count, total = shorten(item["tensor"]), item["count"], item["total"]
        warn(f"{name}: all zeros in {count} of {total} of its scales")
    if as_json:
        print_json(report)
        return
    for text in _describe_checkpoint(report):
        print_text(text)


def _describe_checkpoint(report: Mapping[str, Any]) -> Iterator[str]:
    before, after = (format_size(size) for size in report["bytes"].values())
    yield (
        f"{len(report['quantized'])} linears quantized ({report['scheme']}, {report['format']}), "
        f"weights {before} -> {after}, {report['duration_s']:.1f} s"
    )
    yield from _describe_unquantized(report["left"])
    yield from _describe_rounding(report["rounded"])
    if report["kv_bytes_per_token"]:
        plain, quantized = report["kv_bytes_per_token"].values()
        scales = "with its scales" if report["has_kv_scales"] else "without scales: 1.0"
        yield f"KV cache: {plain:,} bytes per token now, {quantized:,} with FP8 ({scales})"
    yield f"written to {report['out']}: {_list_files(report['files'])}"
    yield from describe_serving(report)


def _describe_unquantized(left: list[dict[str, str]]) -> Iterator[str]:
    """Describe what stays unquantized for each reason, with a few names."""
    for reason in dict.fromkeys(item["why"] for item in left):
        names = [item["module"] for item in left if item["why"] == reason]
        yield f"  not quantized ({reason}): {cut_list(names, _SHOWN)}"


def _describe_rounding(rounded: list[dict[str, Any]]) -> Iterator[str]:
    """Describe how many linears GPTQ rounded, how much it gained, and which it did not round."""
    if not rounded:
        return
    chosen = [item for item in rounded if item["rounding"] == GPTQ]
    gains = [
        item["gptq_db"] - item["nearest_db"]
        for item in chosen
        if None not in (item["gptq_db"], item["nearest_db"])
    ]
    gained = f": {median(gains):.1f} dB less output error in the median" if gains else ""
    yield f"{len(chosen)} of {len(rounded)} linears rounded by GPTQ{gained}"
    for why in dict.fromkeys(item["why"] for item in rounded if item["why"]):
        names = [item["module"] for item in rounded if item["why"] == why]
        yield f"  rounded to nearest ({why}): {cut_list(names, _SHOWN)}"
    raised = [item["module"] for item in rounded if (item["damping"] or 0) > DAMPING]
    if raised:
        yield f"  more damping, for a Hessian that was not positive: {cut_list(raised, _SHOWN)}"


def _list_files(files: list[str]) -> str:
    """List files, all shards as one entry."""
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) <= 1:
        return list_top_level(files)
    others = [name for name in files if name not in shards]
    return f"{len(shards)} shards, {list_top_level(others)}"
