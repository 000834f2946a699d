"""A plan as one HTML page: the frontier, and the groups with their reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.checkpoint.disk import format_size
from fp8calib.render.plan import describe_sum, frontier_table, groups_table, refused_table
from fp8calib.results.plan import PlanResult
from fp8calib.verification.page.charts import BASELINE, STYLES, Figure, kld_chart
from fp8calib.verification.page.page import Section, render


def write_plan_page(result: PlanResult, path: Path) -> None:
    """Write the page atomically.

    Raises:
        ExportError: the file cannot be written.
    """
    sections = [
        Section(title="KLD against bytes, on held-out text", figures=_draw_frontier(result)),
        Section(title="Groups, by their most costly choice", table=groups_table(result)),
        Section(title="What is no choice", table=refused_table(result), is_folded=True),
    ]
    page = render(
        title="FP8 plan of ",
        subject=result.model,
        headline=f"{result.budget}: {result.why}",
        details=describe_sum(result),
        warnings=result.warnings,
        command="\n".join(filter(None, (result.write, result.serve))),
        first=replace(frontier_table(result), title=""),
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
    series = [
        ("the plan", STYLES[1], chosen),
        ("other plans", STYLES[0], others),
        ("one scheme for all", BASELINE, uniform),
    ]
    places = [
        (f"{point.size_bytes / 1e6:.4g}", f"{point.name}: {format_size(point.size_bytes)}")
        for point in points
    ]
    return [kld_chart("KL divergence by size", places, series, x_title="size, MB", low=-4)]
