"""Plan a checkpoint under a budget: choices of schemes and caches from what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import torch

from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.resumable_folder import ResumableFolder
from fp8calib.data.plan import DataPlan, batches
from fp8calib.errors import VerificationError
from fp8calib.fp8.schemes import SCHEMES
from fp8calib.jobs.calibration import CalibrationJob, choose_mode, fields_of, run_calibration
from fp8calib.jobs.function import as_function
from fp8calib.jobs.planning.groups import GroupMaker, require_choices
from fp8calib.jobs.planning.opened import OpenedPlan, join_texts, open_plan
from fp8calib.jobs.planning.recipe import (
    RECIPE_NAME,
    PlannedScheme,
    describe_plan,
    spell_recipe,
    spell_serve,
    spell_write,
)
from fp8calib.jobs.planning.report import PlanReport, make_report, name_budget
from fp8calib.jobs.planning.runs import MEASURED_NAME, Measurements, Runs
from fp8calib.jobs.quantization.planned import open_planned
from fp8calib.jobs.quantization.servable import find_fault, replay_plan
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.stats import CalibrationStats, drop_kv, read_stats
from fp8calib.jobs.verification.comparison import open_verify_job
from fp8calib.jobs.verification.job import VerifyJob
from fp8calib.jobs.verification.memory import choose_verification_mode, open_reference
from fp8calib.jobs.verification.options import resolve_options
from fp8calib.machine.command_line import spell_command
from fp8calib.model.load import LoadedModel
from fp8calib.render.page.plan import write_plan_page
from fp8calib.requests.plan import PlanRequest, read_size
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.plan import PlanResult
from fp8calib.results.run_plan import RunPlan
from fp8calib.run.planning.whole_or_streamed import MemoryMode
from fp8calib.stats.calibration_stats import REPORT_NAME, STATS_NAME, load_stats, save_stats
from fp8calib.stats.fingerprint import versions
from fp8calib.verification.candidates import Candidate, Target
from fp8calib.verification.compare.comparison import advance_by_share
from fp8calib.verification.compare.streamed import StreamedComparison
from fp8calib.verification.planning.choices import Group, emulate_plan, list_uniform
from fp8calib.verification.planning.gradients import estimate
from fp8calib.verification.planning.search import Budget, Search
from fp8calib.verification.report import FP8_CACHE, RunProvenance
from fp8calib.verification.sensitivity import LAYERS_AT_ONCE

PAGE_NAME = "plan.html"
_OWNED = frozenset({STATS_NAME, REPORT_NAME, MEASURED_NAME, RECIPE_NAME, PAGE_NAME})
_STREAMS = "each group is measured from its own layer on"
_SEED = 0
_GRADIENT_PASSES = 8
"""What the walk for gradients takes, of forward passes: two forward, one back, the products."""


def run(request: PlanRequest, reporter: Reporter) -> PlanResult | RunPlan:
    """Plan a checkpoint, and write the recipe, the page and all figures.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read or run, or its weights cannot be quantized.
        DataError: the data cannot be read, or is one sequence.
        CalibrationError: a forward pass failed.
        VerificationError: nothing can be quantized, or an engine cannot load the plan.
        ExportError: the output cannot be written.
    """
    with open_plan(request) as opened:
        if request.dry_run:
            return _describe_run(opened)
        is_measured = request.resume and (opened.out / MEASURED_NAME).exists()
        with ResumableFolder(
            opened.out,
            owned=_OWNED,
            force=request.force or is_measured,
            tag=opened.tag,
            resume=request.resume,
        ) as folder:
            measurements = Measurements(folder / MEASURED_NAME, opened.tag)
            for place in (folder, opened.out) if request.resume else ():
                if measurements.load(place / MEASURED_NAME):
                    break
            stats = _calibrate(opened, folder, measurements, reporter)
            result = _plan(opened, stats, folder, measurements, reporter)
            (folder / REPORT_NAME).write_bytes(encode_json(result.to_json()))
            write_plan_page(result, folder / PAGE_NAME)
    for text in result.warnings:
        reporter.warn(text)
    return result


def _calibrate(
    opened: OpenedPlan, folder: Path, measurements: Measurements, reporter: Reporter
) -> CalibrationStats:
    """Calibrate, or take the statistics that are given or that an earlier run wrote."""
    if opened.request.stats is not None:
        return CalibrationStats.of(read_stats(opened.request.stats)[0])
    path = folder / STATS_NAME
    earlier = path if path.exists() else opened.out / STATS_NAME
    if opened.request.resume and earlier.exists() and not measurements.is_empty:
        reporter.say("calibrated before")
        stats = CalibrationStats.of(load_stats(earlier))
    else:
        reporter.say(f"calibrate on {opened.calibration.num_tokens:,} tokens")
        stats = run_calibration(opened.model, opened.recipe, opened.calibration, reporter)
    save_stats(stats, path)
    return stats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes beside those of the groups, and those of everything in 16 bits."""

    fixed: int
    unquantized: int


def _plan(
    opened: OpenedPlan,
    stats: CalibrationStats,
    folder: Path,
    measurements: Measurements,
    reporter: Reporter,
) -> PlanResult:
    request = opened.request
    maker = GroupMaker(opened, stats)
    for text in maker.describe_refused():
        reporter.say(text)
    job, mode = _open_job(opened, maker)
    for text in mode.describe():
        reporter.say(text)
    with open_reference(job, mode, reporter) as (reference, comparison):
        assert isinstance(comparison, StreamedComparison)  # noqa: S101 -- always streamed
        groups = maker.make(reference.model)
        sizes = _count_sizes(opened, groups)
        uniform = list_uniform(groups, caches=() if maker.refused_cache else (FP8_CACHE,))

        def open_runs(text: DataPlan, stage: str) -> Runs:
            return Runs(
                comparison,
                groups,
                text,
                measurements,
                reporter,
                batch_size=request.batch_size,
                stage=stage,
            )

        slopes = _find_slopes(opened, groups, comparison, measurements, reporter)
        search = Search(
            groups,
            slopes,
            open_runs(opened.search, "searching"),
            passes=request.passes,
            num_layers=len(opened.target.geometry.layers),
        )
        found = search.search(_make_budget(request, sizes), uniform.values())
        planned = describe_plan(groups, found.plan, request.rounding)
        _require_loaded(opened, planned, stats)
        judged = {"plan": found.plan, **uniform}
        judged |= {
            f"frontier {i + 1}": plan for i, plan in enumerate(found.list_between(request.points))
        }
        runs = open_runs(opened.held_out, "judging the plan")
        scores = runs(judged.values())
    stats_path = str(request.stats or opened.out / STATS_NAME)
    command = spell_write(opened, planned, stats_path)
    result = make_report(
        PlanReport(
            opened=opened,
            groups=groups,
            found=found,
            judged=judged,
            scores=scores,
            lengths=runs.lengths,
            spent=search.spent,
            limit=_find_limit(request, sizes),
            fixed_bytes=sizes.fixed,
            unquantized_bytes=sizes.unquantized,
            write=command,
            serve=spell_serve(opened, planned),
            recipe=RECIPE_NAME,
            provenance=RunProvenance(
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                command=spell_command(),
                model_hash=opened.target.fingerprint,
                data_hash=opened.held_out.fingerprint,
                versions=versions(),
            ),
        )
    )
    (folder / RECIPE_NAME).write_text(
        spell_recipe(opened, planned, command, result.budget), encoding="utf-8"
    )
    return result


def _count_sizes(opened: OpenedPlan, groups: Sequence[Group]) -> _Sizes:
    """Count what stays as it is; scales of the KV cache too, as one FP8 cache brings all."""
    plain = sum(group.choices[0].size_bytes for group in groups)
    weights = sum(g.choices[0].size_bytes for g in groups if not g.is_cache)
    stored = sum(each.size_bytes for each in opened.target.checkpoint.tensors.values())
    scales = 8 * sum(len(group.layers) for group in groups if group.is_cache)
    return _Sizes(fixed=stored - weights + scales, unquantized=stored - weights + plain)


def _find_limit(request: PlanRequest, sizes: _Sizes) -> float:
    """Give the limit of the budget: bytes, a divergence, or a ratio."""
    if request.max_bytes is not None:
        size = read_size(request.max_bytes)
        return size * sizes.unquantized if size <= 1 else size
    return cast("float", request.max_kld if request.max_ratio is None else request.max_ratio)


def _make_budget(request: PlanRequest, sizes: _Sizes) -> Budget:
    limit = _find_limit(request, sizes)
    if request.max_bytes is not None:
        return Budget(most_bytes=limit - sizes.fixed)
    if request.max_kld is not None:
        return Budget(most_kld=limit)
    return Budget(most_log_ratio=math.log(limit))


def _open_job(opened: OpenedPlan, maker: GroupMaker) -> tuple[VerifyJob, MemoryMode]:
    """Open the comparison, in as much memory as a full round of plans needs."""
    request = opened.request

    def make(model: LoadedModel, _target: Target) -> list[Candidate]:
        groups = maker.make(model)
        require_choices(maker, groups)
        whole = emulate_plan(groups, tuple(len(group.choices) - 1 for group in groups))
        names = map(str, range(LAYERS_AT_ONCE))
        return [Candidate(name=name, description="", emulation=whole) for name in names]

    options = resolve_options(
        VerifyRequest(str(request.model), engine=opened.emulated.key, batch_size=request.batch_size)
    )
    job = open_verify_job(opened.model, options, join_texts(opened))
    job = replace(job, make_candidates=make)
    extra = {"gradients": _estimate_gradient_bytes(opened)}
    mode = choose_verification_mode(job, always_streams=_STREAMS, extra_bytes=extra)
    return job, mode


def _estimate_gradient_bytes(opened: OpenedPlan) -> int:
    """Estimate what the walk back takes: each scheme's weights of a layer, and its activations."""
    tokens = max(len(s) for s in opened.search.sequences) * opened.request.batch_size
    largest = 0
    for layer in opened.target.geometry.layers:
        own = [each for each in layer.linears if not each.num_experts]
        weights = sum(each.in_features * each.out_features for each in own)
        widths = sum(each.in_features + each.out_features for each in own)
        largest = max(largest, 4 * (weights * (len(SCHEMES) + 1) + 3 * tokens * widths))
    return largest


def _find_slopes(
    opened: OpenedPlan,
    groups: Sequence[Group],
    comparison: StreamedComparison,
    measurements: Measurements,
    reporter: Reporter,
) -> dict[tuple[int, int], torch.Tensor]:
    """Find the derivatives in the direction of each choice, or take those of an earlier run."""
    names = {
        f"{group.name}={choice.name}": (g, c)
        for g, group in enumerate(groups)
        for c, choice in enumerate(group.choices)
        if c
    }
    stored = measurements.find("slopes/")
    if not stored:
        chosen = list(batches(opened.search, opened.request.batch_size))
        layers = len(opened.target.geometry.layers)
        total = 2 * sum(batch.num_tokens for batch in chosen)
        reporter.stage("gradients", total, unit="tokens")
        found = estimate(
            comparison.streamed,
            comparison.streaming,
            chosen,
            groups,
            seed=_SEED,
            advance=advance_by_share(layers, reporter.advance),
        )
        places = {place: name for name, place in names.items()}
        stored = {places[place]: slope for place, slope in found.items()}
        measurements.add("slopes/", stored)
    return {names[name]: slope for name, slope in stored.items() if name in names}


def _require_loaded(opened: OpenedPlan, planned: PlannedScheme, stats: CalibrationStats) -> None:
    """Refuse a plan that an engine does not load, as `check` judges what would be written.

    Raises:
        VerificationError: naming the engine, and why.
    """
    if planned.quantize is None:
        return
    with open_planned(
        str(opened.folder),
        planned.settings(),
        stats if planned.caches else drop_kv(stats),
        revision=None,
        dequantize=False,
        allow_unservable=True,
    ) as made:
        keys = [engine.key for engine in opened.engines]
        reports, unchecked = replay_plan(made.plan, opened.folder, keys)
    for engine, report in reports.items():
        if why := find_fault(report):
            raise VerificationError(
                f"{engine} does not load the plan: {why}",
                hint="name one --scheme, or another --engine",
            )
    if unchecked:
        raise VerificationError(unchecked)


def _describe_run(opened: OpenedPlan) -> RunPlan:
    """Describe the run without running text."""
    request, model = opened.request, opened.model
    job = CalibrationJob(**fields_of(model), recipe=opened.recipe, plan=opened.calibration)
    mode = choose_mode(job, scratch=Path.cwd(), expects_duration=True)
    pass_s = None if mode.plan is None else mode.plan.expected_s
    calibrated, searched = opened.calibration.num_tokens, opened.search.num_tokens
    held_out = opened.held_out.num_tokens
    passes = _GRADIENT_PASSES + request.passes
    judged = 1 + request.points + 2 * len(SCHEMES)
    shares = (1, passes * searched / calibrated, judged * held_out / calibrated)
    return RunPlan(
        plan={
            "model": str(request.model),
            "engine": ", ".join(engine.key for engine in opened.engines),
            "budget": name_budget(request),
            "dtype": model.dtype,
            "device": model.device,
            "steps": [
                f"calibrate on {calibrated:,} tokens",
                f"gradients and at most {request.passes} passes over {searched:,} of them",
                f"at most {judged} passes over {held_out:,} others",
            ],
            "data": list(opened.calibration.sources),
            "out": str(opened.out),
            **mode.as_json(),
            "expected_s": None if pass_s is None else pass_s * sum(shares),
        }
    )


# Without `dry_run`, which gives a RunPlan, it always gives a PlanResult.
plan = as_function("plan", PlanRequest, cast("Callable[[PlanRequest, Reporter], PlanResult]", run))
