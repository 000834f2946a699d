"""Plan a checkpoint under a budget: choices of schemes, rules and caches from what they cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8calib.calibration.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationStats,
    load_stats,
    save_stats,
)
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.output import resumable_folder
from fp8calib.commands.job import CalibrationJob
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.stats import read_stats
from fp8calib.numerics.rules import AMAX
from fp8calib.plugins.plan.choices import Choices, Plan, list_uniform
from fp8calib.plugins.plan.measure import MEASURED_NAME, Measure, Measurements, open_model
from fp8calib.plugins.plan.opened import OpenedPlan, open_plan
from fp8calib.plugins.plan.recipe import (
    RECIPE_NAME,
    make_planned_scheme,
    require_loaded,
    spell_recipe,
)
from fp8calib.plugins.plan.render import write_plan_page
from fp8calib.plugins.plan.report import CHOSEN, make_report
from fp8calib.plugins.plan.request import RULES, PlanRequest
from fp8calib.plugins.plan.result import PlanResult
from fp8calib.plugins.plan.search import Search
from fp8calib.verification.opened import require_head

PAGE_NAME = "plan.html"
_OWNED = frozenset({STATS_NAME, REPORT_NAME, MEASURED_NAME, RECIPE_NAME, PAGE_NAME})


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
        require_head(opened.model)
        told = dict.fromkeys((*opened.calibration.warnings, *opened.held_out.warnings))
        for text in told:
            reporter.warn(text)
        if request.dry_run:
            return _describe_run(opened, reporter)
        is_measured = request.resume and (opened.out / MEASURED_NAME).exists()
        with resumable_folder(
            opened.out,
            owned=_OWNED,
            force=request.force or is_measured,
            tag=opened.tag,
            resume=request.resume,
        ) as folder:
            measurements = Measurements(folder / MEASURED_NAME, opened.tag)
            places = (folder, opened.out) if request.resume else ()
            is_known = any(measurements.load(place / MEASURED_NAME) for place in places)
            stats = _calibrate(opened, folder, reporter, is_known=is_known)
            result = _plan(opened, stats, folder, measurements, reporter)
            (folder / REPORT_NAME).write_bytes(encode_json(result.to_json()))
            write_plan_page(result, folder / PAGE_NAME)
    for text in result.warnings:
        if text not in told:
            reporter.warn(text)
    return result


def _calibrate(
    opened: OpenedPlan, folder: Path, reporter: Reporter, *, is_known: bool
) -> CalibrationStats:
    """Calibrate, or take the statistics that are given or that an earlier run wrote."""
    if opened.request.stats is not None:
        return read_stats(opened.request.stats)[0]
    places = [place / STATS_NAME for place in (folder, opened.out)]
    earlier = next((path for path in places if is_known and path.exists()), None)
    if earlier is None:
        reporter.say(f"calibrate on {opened.calibration.num_tokens:,} tokens")
        job = _make_job(opened, reporter)
        stats, _ = job.run(job.choose_mode(), job.make_header(), None)
    else:
        reporter.say("calibrated before")
        stats = load_stats(earlier)
    save_stats(stats, places[0])
    return stats


def _make_job(opened: OpenedPlan, reporter: Reporter) -> CalibrationJob:
    """Make the job that calibrates; the plan itself is what is written."""
    return CalibrationJob(
        model=opened.model,
        recipe=opened.recipe,
        plan=opened.calibration,
        out=None,
        reporter=reporter,
    )


def _plan(
    opened: OpenedPlan,
    stats: CalibrationStats,
    folder: Path,
    measurements: Measurements,
    reporter: Reporter,
) -> PlanResult:
    request, choices = opened.request, Choices(opened, stats)
    for text in choices.describe_refused():
        reporter.say(text)
    with open_model(opened, choices, reporter) as model:
        run_on = partial(Measure, model, choices, measurements, reporter, request.batch_size)
        searched, held_out = run_on(opened.search, "searching"), run_on(opened.held_out, "judging")
        can_skip = all(engine.can_skip_caches for engine in opened.engines)
        search = Search(choices, searched, passes=request.passes, can_skip=can_skip)
        if opened.budget.kind == "bytes" and opened.budget.limit <= 1:  # a share
            limit = opened.budget.limit * choices.unquantized_bytes
            opened = replace(opened, budget=replace(opened.budget, limit=limit))
        best = search.run(opened.budget, request.rules or RULES, points=request.points)
        planned = make_planned_scheme(choices.units, best.plan)
        require_loaded(opened, planned, stats)
        judged: dict[str, Plan] = {CHOSEN: best.plan, **list_uniform(choices.units)}
        if planned.rules:
            amax = dict.fromkeys(planned.rules, str(AMAX))
            judged["plan with amax"] = {**best.plan, **amax}
        judged |= {f"frontier {number}": each for number, each in enumerate(search.points, start=1)}
        held_out.run(list(judged.values()))
    (folder / RECIPE_NAME).write_text(spell_recipe(opened, planned), encoding="utf-8")
    return make_report(opened, choices, search, best, planned, judged, held_out)


def _describe_run(opened: OpenedPlan, reporter: Reporter) -> RunPlan:
    """Describe the run without running text."""
    request, model, text = opened.request, opened.model, opened.calibration
    return RunPlan(
        plan={
            "model": str(request.model),
            "weights_size_bytes": model.checkpoint.total_size_bytes,
            "engine": ", ".join(engine.key for engine in opened.engines),
            "budget": opened.budget.name,
            "dtype": model.dtype,
            "dtype_why": model.dtype_why,
            "device": model.device,
            "sequences": len(text.sequences),
            "tokens": text.num_tokens,
            "steps": [
                f"calibrate on {text.num_tokens:,} tokens",
                f"one scheme for all, then at most {request.passes} passes over "
                f"{opened.search.num_tokens:,} of them, layer by layer",
                f"judge plans on {opened.held_out.num_tokens:,} others",
            ],
            "data": list(text.sources),
            "out": str(opened.out),
            **_make_job(opened, reporter).choose_mode().as_json(),
        }
    )


plan = as_function("plan", PlanRequest, run)
