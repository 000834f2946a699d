"""The result of a calibration, and the plan of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from platform import python_version
from statistics import median
from typing import Any

from fp8calib.calibration import calibration_stats
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.commands.calibrate import CalibrateResult, Coverage, ExpertLayer, Experts
from fp8calib.commands.command_line import spell_command
from fp8calib.commands.result import BeforeAfter
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.saturation import compute_position_saturation, compute_saturation
from fp8calib.formats.write import Note
from fp8calib.jobs.recipe_options import decide_query
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.stats import CalibrationStats
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
    experts = {name.removesuffix(".up_proj"): seen for name, seen in stats.expert_counts.items()}
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
        **job.count(),
        **cost,
        dtype=job.dtype,
        dtype_why=job.dtype_why,
        device=job.device,
        engine=stats.header.engine,
        batch_size=job.batch_size,
        rule=str(job.recipe.scales.rule),
        rules={pattern: str(rule) for pattern, rule in job.recipe.scales.rules.items()} or None,
        coverage=Coverage(observed=len(stats.sites), skipped=stats.header.skipped),
        saturation=compute_saturation(stats),
        positions=compute_position_saturation(stats),
        expert_tokens=experts,
        # another shard may reach the experts that this one did not
        experts=None if stats.shard else _count_experts(experts, job.recipe.scales.fallback),
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
        **job.count(),
        "data": list(plan.sources) if plan else [],
        "rows": plan.rows.to_json() if plan and plan.rows else None,
        "out": str(job.out),
        "writes": sorted(job.owned),
        **mode.as_json(),
        **more,
    }
    text = plan.rows.describe() if plan and plan.rows else ()
    return RunPlan(plan=described, text=tuple(text))


def _count_experts(counts: Mapping[str, list[int]], fallback: Fallback | None) -> Experts | None:
    """Summarize the tokens that reached the experts of each layer; None without experts."""
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
            for module, tokens in sorted(counts.items())
        ),
    )
