"""Plan a checkpoint under a budget: choices of schemes, rules and caches from what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8calib.calibration.calibrate import run_calibration
from fp8calib.calibration.calibration_stats import RunStats, load_stats_file, save_stats
from fp8calib.calibration.job import CalibrationJob
from fp8calib.calibration.origin import REPORT_NAME, STATS_NAME
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.output import format_size, output_folder, write_file_atomic
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.stats import read_stats
from fp8calib.numerics.rules import AMAX
from fp8calib.plugins.plan.choices import Choices, Plan, list_uniform
from fp8calib.plugins.plan.inputs import OpenedPlan, open_plan
from fp8calib.plugins.plan.measure import MEASURED_NAME, Measure, Measurements, open_measured_model
from fp8calib.plugins.plan.recipe import (
    RECIPE_NAME,
    make_planned_scheme,
    require_loaded,
    spell_recipe,
)
from fp8calib.plugins.plan.report import CHOSEN, PlanResult, make_report
from fp8calib.plugins.plan.request import RULES, PlanRequest
from fp8calib.plugins.plan.search import Search
from fp8calib.text import Answer, Block, Cell, Line, Table
from fp8calib.verification.open_candidates import require_head
from fp8calib.verification.page.charts import BASELINE, STYLES, Figure, kld_curve, place_chart
from fp8calib.verification.page.page import PageSection, render
from fp8calib.verification.tables import describe_pair, format_kld, format_mean_kld

PAGE_NAME = "plan.html"
_SHOWN = 24
"""Groups in a terminal; the page has all."""
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
        for text in (*opened.calibration.warnings, *opened.held_out.warnings):
            reporter.warn(text)
        if request.dry_run:
            return _describe_run(opened, reporter)
        is_measured = request.resume and (opened.out / MEASURED_NAME).exists()
        with output_folder(
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
            _write_plan_page(result, folder / PAGE_NAME)
    for text in result.warnings:
        reporter.warn(text)
    return result


def _calibrate(opened: OpenedPlan, folder: Path, reporter: Reporter, *, is_known: bool) -> RunStats:
    """Calibrate, or take the statistics that are given or that an earlier run wrote."""
    if opened.request.stats is not None:
        return read_stats(opened.request.stats)[0]
    places = [place / STATS_NAME for place in (folder, opened.out)]
    earlier = next((path for path in places if is_known and path.exists()), None)
    if earlier is None:
        reporter.say(f"calibrate on {opened.calibration.num_tokens:,} tokens")
        reporter.say(opened.model.describe())
        stats, _ = run_calibration(_make_job(opened, reporter))
    else:
        reporter.say("calibrated before")
        stats = load_stats_file(earlier)
    save_stats(stats, places[0])
    return stats


def _make_job(opened: OpenedPlan, reporter: Reporter) -> CalibrationJob:
    """Make the job that calibrates; the plan itself is what is written."""
    return CalibrationJob(
        model=opened.model,
        observe=opened.recipe.observe,
        recipe_name=opened.recipe.name,
        plan=opened.calibration,
        asked_batch_size=opened.request.batch_size,
        progress=reporter,
    )


def _plan(
    opened: OpenedPlan,
    stats: RunStats,
    folder: Path,
    measurements: Measurements,
    reporter: Reporter,
) -> PlanResult:
    request, choices = opened.request, Choices(opened, stats)
    for text in choices.describe_refused():
        reporter.say(text)
    with open_measured_model(opened, choices, reporter) as model:
        run_on = partial(Measure, model, choices, measurements, reporter, request.batch_size)
        searched, held_out = run_on(opened.search, "searching"), run_on(opened.held_out, "judging")
        can_skip = all(engine.skip_flag for engine in opened.engines)
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
            **_make_job(opened, reporter).mode.as_json(),
        }
    )


def describe(result: PlanResult, request: PlanRequest) -> Iterator[Block]:
    """Describe the plan."""
    yield Line(f"{result.budget}: {result.why}")
    yield Line(_describe_sum(result))
    yield Line()
    yield _frontier_table(result)
    yield Line()
    yield _groups_table(result, most=_SHOWN)
    yield Line()
    own = "" if request.stats else f", {STATS_NAME}"
    written = f"{result.recipe}, {PAGE_NAME}, {REPORT_NAME}{own}"
    lines = {"next": result.write, "serve": result.serve, f"written to {result.out}": written}
    yield Answer("\n".join(f"{name}: {text}" for name, text in lines.items() if text))


def _describe_sum(result: PlanResult) -> str:
    """Say how far the sum of the groups is from the plan."""
    alone = ""
    if result.summed_kld is not None:
        alone = f", and its groups alone add up to {format_kld(result.summed_kld)}"
    return (
        f"on the {result.search_tokens:,} tokens of the search the plan has KLD "
        f"{format_kld(result.searched_kld)} nats{alone} ({result.passes} passes)"
    )


def _frontier_table(result: PlanResult) -> Table:
    """List the plans that were run on the text that is held out."""
    return Table(
        title=f"plans on {result.tokens:,} tokens that are held out, in {result.sequences} "
        f"sequences ({result.emulated})",
        columns=["plan", "size", "KLD mean ± se", "ratio", "against the plan"],
        rows=[
            [
                Cell("the plan", kind="name") if point.is_chosen else point.name,
                format_size(point.size_bytes),
                format_mean_kld(point.kld_mean, point.kld_se),
                f"{point.ppl_ratio:.4f}",
                "" if point.against_chosen is None else describe_pair(point.against_chosen),
            ]
            for point in result.frontier
        ],
        words=(0, 4),
    )


def _groups_table(result: PlanResult, *, most: int | None = None) -> Table:
    """List the groups, those that cost most first."""
    ranked = sorted(
        result.groups,
        key=lambda group: max((choice.kld_mean for choice in group.choices), default=0.0),
        reverse=True,
    )
    shown = ranked[:most]
    title = "groups, by their most costly choice"
    if len(shown) < len(ranked):
        title = f"{title}: {len(shown)} of {len(ranked)}"
    return Table(
        title=title,
        columns=["group", "choice", "saves", "why"],
        rows=[
            [group.name, group.choice, format_size(group.saved_bytes), group.why] for group in shown
        ],
        words=(0, 1, 3),
    )


def _write_plan_page(result: PlanResult, path: Path) -> None:
    """Write the page atomically."""
    sections = [
        PageSection(title="KLD against bytes, on held-out text", figures=_draw_frontier(result)),
        PageSection(title="Groups, by their most costly choice", table=_groups_table(result)),
    ]
    page = render(
        title="FP8 plan of ",
        subject=result.model,
        headline=f"{result.budget}: {result.why}",
        details=[_describe_sum(result)],
        warnings=result.warnings,
        command="\n".join(filter(None, (result.write, result.serve))),
        first=replace(_frontier_table(result), title=""),
        badges={},
        run=(
            f"{result.emulated}, emulated",
            f"{result.tokens:,} tokens that are held out",
            f"{result.dtype} on {result.device}",
        ),
        sections=sections,
        provenance=result.provenance,
        facts={},
    )
    write_file_atomic(path, page.encode("utf-8", "replace"))


def _draw_frontier(result: PlanResult) -> list[Figure]:
    points = sorted(result.frontier, key=lambda point: point.size_bytes)
    chosen = [point if point.is_chosen else None for point in points]
    uniform = [point if point.is_uniform and not point.is_chosen else None for point in points]
    others = [None if point.is_uniform or point.is_chosen else point for point in points]
    curves = [
        kld_curve("the plan", STYLES[1], chosen),
        kld_curve("other plans", STYLES[0], others),
        kld_curve("one scheme for all", BASELINE, uniform),
    ]
    places = [
        (f"{point.size_bytes / 1e6:.4g}", f"{point.name}: {format_size(point.size_bytes)}")
        for point in points
    ]
    return [place_chart("KLD by size", places, curves, x_title="size, MB")]


plan = as_function("plan", PlanRequest, run)
