"""A plan as text and as a page: its answer, the frontier, the groups, and what to run next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fp8calib.checkpoint.disk import format_size
from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.plugins.plan.request import PlanRequest
from fp8calib.plugins.plan.result import PlanResult
from fp8calib.text import Answer, Block, Cell, Line, Table
from fp8calib.verification.figures import format_kld, format_mean_kld
from fp8calib.verification.page.charts import BASELINE, STYLES, Figure, kld_curve, place_chart
from fp8calib.verification.page.page import Section, render
from fp8calib.verification.report import describe_pair

_SHOWN = 24
"""Groups in a terminal; the page has all."""


def describe(result: PlanResult, request: PlanRequest) -> Iterator[Block]:
    """Describe the plan."""
    yield Line(f"{result.budget}: {result.why}")
    yield Line(describe_sum(result))
    yield Line()
    yield frontier_table(result)
    yield Line()
    yield groups_table(result, most=_SHOWN)
    yield Line()
    own = "" if request.stats else ", stats.safetensors"
    written = f"{result.recipe}, plan.html, report.json{own}"
    lines = {"next": result.write, "serve": result.serve, f"written to {result.out}": written}
    yield Answer("\n".join(f"{name}: {text}" for name, text in lines.items() if text))


def describe_sum(result: PlanResult) -> str:
    """Say how far the sum of the groups is from the plan."""
    return (
        f"on the {result.search_tokens:,} tokens of the search the plan has KLD "
        f"{format_kld(result.searched_kld)} nats, and its groups alone add up to "
        f"{format_kld(result.summed_kld)} ({result.passes} passes)"
    )


def frontier_table(result: PlanResult) -> Table:
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


def groups_table(result: PlanResult, *, most: int | None = None) -> Table:
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


def write_plan_page(result: PlanResult, path: Path) -> None:
    """Write the page atomically.

    Raises:
        ExportError: the file cannot be written.
    """
    sections = [
        Section(title="KLD against bytes, on held-out text", figures=_draw_frontier(result)),
        Section(title="Groups, by their most costly choice", table=groups_table(result)),
    ]
    page = render(
        title="FP8 plan of ",
        subject=result.model,
        headline=f"{result.budget}: {result.why}",
        details=[describe_sum(result)],
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
