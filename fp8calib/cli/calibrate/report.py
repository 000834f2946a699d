"""The report of a calibration, as JSON and as text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from fp8calib.checkpoint.json_files import SCHEMA_VERSION
from fp8calib.cli.calibrate.processes import count_planned, count_run, describe_next
from fp8calib.cli.command_line import spell_command
from fp8calib.cli.console import list_top_level, print_text, prints_json, say, show_error, warn
from fp8calib.cli.serving import describe_serving_briefly
from fp8calib.commands.show import show_stats
from fp8calib.dialects.registry import find_dialect
from fp8calib.dialects.write import Note
from fp8calib.engines.serving import Serving, find_scale_serving
from fp8calib.errors import ExportError
from fp8calib.geometry.kv_bytes import kv_bytes_per_token
from fp8calib.jobs.recipe_options import decide_query
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.run import RunMeasurements
from fp8calib.render.show import describe_skipped
from fp8calib.render.summary import summarize_briefly
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.run.planning.whole_or_streamed import MemoryMode
from fp8calib.scales.rules import Fallback
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.saturation import compute_position_saturation, compute_saturation


def build_calibration_report(
    job: ResumableJob,
    stats: CalibrationStats,
    measured: RunMeasurements,
    *,
    folder: Path,
    files: Sequence[str],
    notes: Sequence[Note],
) -> dict[str, Any]:
    """Build the report of a finished run: the content of report.json.

    `folder` is where the files are now; `job.out` is where they will be.
    """
    served = list(_replay_engines(job, stats, folder))
    geometry = stats.geometry
    before, after = kv_bytes_per_token(geometry)
    saturation = compute_saturation(stats)
    by_position = compute_position_saturation(stats)
    counted = count_run(job, stats)
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": True,
        "model": job.name,
        "command": spell_command(),
        "recipe": job.recipe.name,
        "data": list(job.plan.sources) if job.plan else [],
        "seq_len": job.plan.seq_len if job.plan else None,
        "rows": job.plan.rows.to_json() if job.plan and job.plan.rows else None,
        "measured_quantized": job.checkpoint.form,
        "architecture": geometry.architecture,
        "out": str(job.out),
        "files": list(files),
        **counted,
        "duration_s": measured.duration_s,
        "tokens_per_s": (counted["tokens"] - measured.resumed_tokens) / measured.duration_s,
        "dtype": job.dtype,
        "dtype_why": job.dtype_why,
        "device": job.device,
        "memory": dict(measured.memory),
        "batch_size": job.recipe.data.batch_size,
        "batch_back_off": [asdict(each) for each in measured.back_offs],
        "resumed_sequences": measured.resumed,
        "ranks": measured.num_ranks,
        "rule": str(job.recipe.scales.rule),
        "coverage": {
            "observed": len(stats.sites),
            "skipped": [item.model_dump() for item in stats.header.skipped],
        },
        "saturation": saturation.model_dump() if saturation else None,
        "positions": by_position.model_dump() if by_position else None,
        "expert_tokens": _expert_tokens(stats),
        "experts": count_experts(stats, job.recipe.scales.fallback),
        "kv_bytes_per_token": {"before": before, "after": after},
        "serving": [
            {"format": name, **asdict(item)} for name, found in served for item in found.commands
        ],
        "limitations": [
            {"format": name, **asdict(item)}
            for name, item in dict.fromkeys(
                (name, item) for name, found in served for item in found.limitations
            )
        ],
        "other_engines": [
            {"format": name, **asdict(item)} for name, found in served for item in found.others
        ],
        "warnings": [
            *job.describe_decoded(),
            *(job.plan.warnings if job.plan else ()),
            *decide_query(job.recipe, stats).notes,
            *map(str, notes),
        ],
        "versions": stats.header.versions,
    }


def _replay_engines(
    job: ResumableJob, stats: CalibrationStats, folder: Path
) -> Iterator[tuple[str, Serving]]:
    """Find who serves each file that was written, by the name of its format."""
    for name in job.recipe.formats:
        dialect = find_dialect(name)
        for tp in dialect.degrees(job.recipe.tp):
            yield (
                name,
                find_scale_serving(
                    folder / dialect.path(tp),
                    job.out / dialect.path(tp),
                    stats.geometry,
                    model=job.checkpoint.folder,
                    model_name=job.name,
                    tp=tp,
                ),
            )


def save_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _expert_tokens(stats: CalibrationStats) -> dict[str, list[int]]:
    return {name.removesuffix(".up_proj"): counts for name, counts in stats.expert_counts.items()}


def describe_calibration_plan(job: ResumableJob, mode: MemoryMode) -> dict[str, Any]:
    """Describe the planned run: the JSON output of --dry-run."""
    plan = job.plan
    return {
        "plan": {
            "model": job.name,
            "architecture": job.prepared.geometry.architecture,
            "layers": len(job.prepared.geometry.layers),
            "weights_size_bytes": job.checkpoint.total_size_bytes,
            "dtype": job.dtype,
            "dtype_why": job.dtype_why,
            "device": job.device,
            **count_planned(job),
            "data": list(plan.sources) if plan else [],
            "rows": plan.rows.to_json() if plan and plan.rows else None,
            "out": str(job.out),
            "writes": sorted(job.owned),
            **mode.as_json(),
        }
    }


def show_calibration_report(
    job: ResumableJob,
    stats: CalibrationStats,
    report: Mapping[str, Any],
    settings: CalibrateRequest,
) -> None:
    """Print the report as text; with --json, on stderr."""
    show = say if prints_json() else print_text
    now = report["sequences"] - report["resumed_sequences"]
    counted = f"{now} of them now, " if report["resumed_sequences"] else ""
    show(
        f"{report['tokens']:,} tokens in {report['sequences']} sequences, {counted}"
        f"{report['duration_s']:.1f} s ({report['tokens_per_s']:,.0f} tokens/s), "
        f"{report['coverage']['observed']} sites observed"
    )
    shown = show_stats(stats)
    for text in (*summarize_briefly(shown), *describe_skipped(shown)):
        show(text)
    if (saturation := compute_saturation(stats)) is not None:
        show(saturation.describe_half())
    for text in describe_experts(report["experts"]):
        show(text)
    before, after = report["kv_bytes_per_token"].values()
    show(f"KV cache: {before:,} bytes per token now, {after:,} with FP8")
    new = report["warnings"][len(job.plan.warnings if job.plan else ()) :]
    for text in new if report["passed"] else new[:-1]:
        warn(text)
    show(f"written to {job.out}: {list_top_level(report['files'])}")
    if (then := describe_next(job)) is not None:
        show(then)
    for text in describe_serving_briefly(report, explained=settings.formats or ()):
        show(text)
    show(f"more: {'; '.join(_suggest_further(job))}")


def conclude(report: Mapping[str, Any]) -> int:
    """Give the exit code; the reason of a failure, which is the last warning, ends the output."""
    if report["passed"]:
        return 0
    code = ExportError.exit_code
    return show_error(ExportError.kind, report["warnings"][-1], "", as_json=False, exit_code=code)


def _suggest_further(job: ResumableJob) -> Iterator[str]:
    """Spell the commands that print what these lines leave out."""
    out = shlex.quote(str(job.out))
    yield f"fp8calib show {out}"
    overlays = (find_dialect(name) for name in job.recipe.formats)
    for path in [each.path() for each in overlays if each.needs_model][:1]:
        yield f"fp8calib check {shlex.quote(str(job.out / path))}"


_SHOWN_LAYERS = 20
_FALLBACKS: Mapping[Fallback, str] = {
    Fallback.LAYER_MAX: "they get the largest scale of the same role in their layer",
    Fallback.ONE: "they get scale 1.0",
    Fallback.REFUSE: "--fallback refuse: no scales are computed for them",
}


def count_experts(stats: CalibrationStats, fallback: Fallback | None) -> dict[str, Any] | None:
    """Count the tokens that reached the experts of each layer; None without experts.

    None for a shard too: another shard may reach the experts that this one did not.
    """
    if stats.shard is not None:
        return None
    counts = dict(sorted(_expert_tokens(stats).items()))
    if not counts:
        return None
    return {
        "fallback": fallback or Fallback.LAYER_MAX,
        "layers": [
            {
                "module": module,
                "min": min(tokens),
                "median": median(tokens),
                "max": max(tokens),
                "never_reached": [expert for expert, count in enumerate(tokens) if count == 0],
            }
            for module, tokens in counts.items()
        ],
    }


def describe_experts(experts: Mapping[str, Any] | None) -> Iterator[str]:
    """Describe the counts of `count_experts` in a few lines."""
    if experts is None:
        return
    layers: Sequence[Mapping[str, Any]] = experts["layers"]
    least, middle, most = (
        pick(layer[key] for layer in layers)
        for pick, key in ((min, "min"), (median, "median"), (max, "max"))
    )
    yield (
        f"tokens per expert: {least:,} to {most:,}, median {middle:,.0f}, in {len(layers)} layers"
    )
    unreached = [layer for layer in layers if layer["never_reached"]]
    if not unreached:
        return
    total = sum(len(layer["never_reached"]) for layer in unreached)
    yield f"{total} experts were never reached: {_FALLBACKS[Fallback(experts['fallback'])]}"
    for layer in unreached[:_SHOWN_LAYERS]:
        yield f"  {layer['module']}: {', '.join(map(str, layer['never_reached']))}"
    if len(unreached) > _SHOWN_LAYERS:
        yield f"  and {len(unreached) - _SHOWN_LAYERS} more layers, see report.json"
