"""Plan a checkpoint under a budget: choices of schemes and caches from what they cost."""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.resumable_folder import resumable_folder
from fp8calib.jobs.calibration import choose_mode, run_calibration
from fp8calib.jobs.function import as_function
from fp8calib.jobs.planning.budget import make_budget, name_budget
from fp8calib.jobs.planning.measure import (
    count_search,
    open_measured,
    require_loaded,
)
from fp8calib.jobs.planning.opened import OpenedPlan, open_plan
from fp8calib.jobs.planning.recipe import (
    RECIPE_NAME,
    make_planned_scheme,
    spell_recipe,
    spell_write,
)
from fp8calib.jobs.planning.report import PlanReport, make_report
from fp8calib.jobs.planning.runs import MEASURED_NAME, Measurements
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.stats import read_stats
from fp8calib.render.plan_page import write_plan_page
from fp8calib.requests.plan import PlanRequest
from fp8calib.results.plan import PlanResult
from fp8calib.results.run_plan import RunPlan
from fp8calib.stats.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationStats,
    load_stats,
    save_stats,
)
from fp8calib.verification.planning.choices import list_uniform
from fp8calib.verification.report import FP8_CACHE

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
        if request.dry_run:
            return _describe_run(opened)
        is_measured = request.resume and (opened.out / MEASURED_NAME).exists()
        with resumable_folder(
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
        return read_stats(opened.request.stats)[0]
    path = folder / STATS_NAME
    earlier = path if path.exists() else opened.out / STATS_NAME
    if opened.request.resume and earlier.exists() and not measurements.is_empty:
        reporter.say("calibrated before")
        stats = load_stats(earlier)
    else:
        reporter.say(f"calibrate on {opened.calibration.num_tokens:,} tokens")
        stats = run_calibration(opened.model, opened.recipe, opened.calibration, reporter)
    save_stats(stats, path)
    return stats


def _plan(
    opened: OpenedPlan,
    stats: CalibrationStats,
    folder: Path,
    measurements: Measurements,
    reporter: Reporter,
) -> PlanResult:
    request = opened.request
    with open_measured(opened, stats, measurements, reporter) as measured:
        groups, sizes = measured.groups, measured.sizes
        caches = () if measured.maker.refused_cache else (FP8_CACHE,)
        uniform = list_uniform(groups, caches=caches)
        search = measured.open_search()
        found = search.search(make_budget(request, sizes), uniform.values())
        planned = make_planned_scheme(groups, found.plan)
        require_loaded(opened, planned, stats)
        points = found.list_between(request.points)
        judged = {"plan": found.plan, **uniform}
        judged |= {f"frontier {number}": plan for number, plan in enumerate(points, start=1)}
        runs = measured.open_runs(opened.held_out, "judging the plan")
        scores = runs(judged.values())
    stats_path = str(request.stats or opened.out / STATS_NAME)
    command = spell_write(opened, planned, stats_path)
    result = make_report(
        PlanReport(
            opened=opened,
            groups=groups,
            sizes=sizes,
            found=found,
            planned=planned,
            judged=judged,
            scores=scores,
            lengths=runs.lengths,
            spent=search.spent,
            write=command,
        )
    )
    (folder / RECIPE_NAME).write_text(
        spell_recipe(opened, planned, command, result.budget), encoding="utf-8"
    )
    return result


def _describe_run(opened: OpenedPlan) -> RunPlan:
    """Describe the run without running text."""
    request, model = opened.request, opened.model
    mode = choose_mode(model, opened.recipe, opened.calibration, scratch=Path.cwd())
    return RunPlan(
        plan={
            "model": str(request.model),
            "engine": ", ".join(engine.key for engine in opened.engines),
            "budget": name_budget(request),
            "dtype": model.dtype,
            "device": model.device,
            "steps": [
                f"calibrate on {opened.calibration.num_tokens:,} tokens",
                f"gradients and at most {count_search(opened)} passes over "
                f"{opened.search.num_tokens:,}, layer by layer",
                f"judge plans on {opened.held_out.num_tokens:,} others",
            ],
            "data": list(opened.calibration.sources),
            "out": str(opened.out),
            **mode.as_json(),
        }
    )


plan = as_function("plan", PlanRequest, run)
