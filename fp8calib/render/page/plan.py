"""A plan as one HTML page: the frontier, and the groups with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.checkpoint.disk import format_size
from fp8calib.render.page.charts import linear_axis, log_axis, scatter_chart
from fp8calib.render.page.sections import Figure, PageSection, list_provenance
from fp8calib.render.page.series import BASELINE, STYLES, Style
from fp8calib.render.plan import describe_sum, frontier_table, groups_table, refused_table
from fp8calib.render.templates import HTML
from fp8calib.results.plan import FrontierPoint, PlanResult
from fp8calib.verification.figures import format_mean_kld

_TITLE = "FP8 plan of "
_MEGABYTE = 1e6
_PLAN, _OTHER, _UNIFORM = STYLES[1], STYLES[0], BASELINE


def write_plan_page(result: PlanResult, path: Path) -> None:
    """Write the page atomically.

    Raises:
        ExportError: the file cannot be written.
    """
    first = replace(frontier_table(result), title="")
    page = HTML.get_template("page/page.html.jinja").render(
        title=_TITLE,
        subject=result.model,
        headline=f"{result.budget}: {result.why}",
        details=describe_sum(result),
        warnings=result.warnings,
        command="\n".join(filter(None, (result.write, result.serve))),
        first=first,
        badges={},
        run=" \N{MIDDLE DOT} ".join(
            (
                f"{result.emulated}, emulated",
                f"{result.tokens:,} tokens that are held out",
                f"{result.dtype} on {result.device}",
            )
        ),
        series=(),
        sections=[each for each in _list_sections(result) if not each.is_empty],
        provenance=list_provenance(result.provenance, {}),
    )
    write_file_atomic(path, page.encode("utf-8", "replace"))


def _list_sections(result: PlanResult) -> Iterator[PageSection]:
    yield PageSection(
        title="The frontier",
        lead="Each mark is a plan that was run on the text that is held out.",
        figures=[_draw_frontier(result)],
        is_folded=False,
    )
    yield PageSection(
        title="Groups",
        lead="By the KLD of the group alone with its most costly choice.",
        table=groups_table(result),
        is_folded=False,
    )
    yield PageSection(
        title="What is no choice",
        lead="Schemes that an engine does not load, or that do not fit a group.",
        table=refused_table(result),
    )


def _draw_frontier(result: PlanResult) -> Figure:
    points = [each for each in result.frontier if each.kld_mean > 0]
    sizes = [each.size_bytes / _MEGABYTE for each in points]
    low, high = min(sizes, default=0.0), max(sizes, default=1.0)
    klds = [each.kld_mean for each in points]
    chart = scatter_chart(
        "KL divergence by size",
        [
            (size, point.kld_mean, _choose_style(point), _describe(point))
            for size, point in zip(sizes, points, strict=True)
        ],
        x=linear_axis("size, MB", sizes, low=int(low), high=int(high) + 1, step=1),
        y=log_axis("mean KLD, nats", klds, low=-4, high=-1),
    )
    legend = [(_PLAN, "the plan"), (_OTHER, "other plans"), (_UNIFORM, "one scheme for all")]
    return Figure(title="KLD against bytes", chart=chart, legend=legend)


def _choose_style(point: FrontierPoint) -> Style:
    if point.is_chosen:
        return _PLAN
    return _UNIFORM if point.is_uniform else _OTHER


def _describe(point: FrontierPoint) -> str:
    kld = format_mean_kld(point.kld_mean, point.kld_se)
    return f"{point.name}: {format_size(point.size_bytes)}, KLD {kld}"
