"""The result of a calibration, and the plan of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from statistics import median
from typing import Any

from fp8calib.calibration import calibration_stats
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.commands.calibrate import CalibrateResult, Coverage, ExpertLayer, Experts
from fp8calib.commands.result import BeforeAfter
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.saturation import compute_position_saturation, compute_saturation
from fp8calib.data.sequences import DataPlan
from fp8calib.formats.write import Note
from fp8calib.jobs.processes import count_planned, count_run
from fp8calib.jobs.recipe_options import decide_query
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.stats import CalibrationStats
from fp8calib.machine.command_line import spell_command
from fp8calib.model.kv_bytes import kv_bytes_per_token
from fp8calib.numerics.rules import Fallback


def make_calibrate_result(
    job: ResumableJob,
    stats: calibration_stats.CalibrationStats,
    cost: Mapping[str, Any],
    *,
    files: Sequence[str] = (),
    notes: Sequence[Note] = (),
) -> CalibrateResult:
    """Make the result of a finished run; `cost` is what `run_job` gave."""
    before, after = kv_bytes_per_token(stats.geometry)
    return CalibrateResult(
        stats=CalibrationStats.of(stats),
        model=job.name,
        command=spell_command(),
        recipe=job.recipe.name,
        data=job.plan.sources if job.plan else (),
        seq_len=job.plan.seq_len if job.plan else None,
        rows=job.plan.rows.to_json() if job.plan and job.plan.rows else None,
        measured_quantized=job.checkpoint.form,
        architecture=stats.geometry.architecture,
        out=job.out,
        files=tuple(files),
        **count_run(job, stats),
        **cost,
        dtype=job.dtype,
        dtype_why=job.dtype_why,
        device=job.device,
        engine=stats.header.engine,
        batch_size=job.recipe.data.batch_size,
        rule=str(job.recipe.scales.rule),
        rules={pattern: str(rule) for pattern, rule in job.recipe.scales.rules.items()} or None,
        coverage=Coverage(observed=len(stats.sites), skipped=stats.header.skipped),
        saturation=compute_saturation(stats),
        positions=compute_position_saturation(stats),
        expert_tokens=_expert_tokens(stats),
        experts=count_experts(stats, job.recipe.scales.fallback),
        kv_bytes_per_token=BeforeAfter(before=before, after=after),
        warnings=(
            *job.describe_decoded(),
            *(job.plan.warnings if job.plan else ()),
            *decide_query(job.recipe, stats).notes,
            *map(str, notes),
        ),
        versions={**stats.header.versions, "python": python_version()},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model_hash=stats.header.model_fingerprint,
        data_hash=stats.header.data_fingerprint,
    )


def save_report(path: Path, result: CalibrateResult) -> None:
    """Write a result as JSON."""
    text = json.dumps(result.to_json(), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _expert_tokens(stats: calibration_stats.CalibrationStats) -> dict[str, list[int]]:
    return {name.removesuffix(".up_proj"): counts for name, counts in stats.expert_counts.items()}


def make_run_plan(job: ResumableJob, mode: MemoryPlan, **more: Any) -> RunPlan:
    """Describe the planned run; `more` is added to it, or replaces what it has."""
    plan = job.plan
    described = {
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
        **more,
    }
    return RunPlan(plan=described, text=tuple(describe_rows(plan)))


def describe_rows(text: DataPlan | None) -> Iterator[str]:
    """Describe the rows of a text: their number, the chat template, and examples."""
    if text is not None and text.rows is not None:
        yield from text.rows.describe()


def count_experts(
    stats: calibration_stats.CalibrationStats, fallback: Fallback | None
) -> Experts | None:
    """Count the tokens that reached the experts of each layer; None without experts.

    None for a shard too: another shard may reach the experts that this one did not.
    """
    if stats.shard is not None:
        return None
    counts = dict(sorted(_expert_tokens(stats).items()))
    if not counts:
        return None
    return Experts(
        fallback=fallback or Fallback.LAYER_MAX,
        layers=tuple(
            ExpertLayer(
                module=module,
                min=min(tokens),
                median=median(tokens),
                max=max(tokens),
                never_reached=tuple(expert for expert, count in enumerate(tokens) if count == 0),
            )
            for module, tokens in counts.items()
        ),
    )
