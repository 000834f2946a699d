"""What the charts draw, by number: positions read back from the SVG against ones worked out."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest

from fp8calib.verification.page.charts import (
    BASELINE,
    FLOOR,
    LEFT,
    RIGHT,
    STYLES,
    TOP,
    Figure,
    db_axis,
    log_axis,
)
from fp8calib.verification.page.page import Section, list_sections, render_page
from fp8calib.verification.report import (
    SCALE_ONE,
    DiagnosisResult,
    HistogramResult,
    KvNeed,
    PositionResult,
    VerifyReport,
)
from tests.kit.reports import make_candidate, make_layer, make_small

CEILING = TOP


def find_section(report: VerifyReport, start: str) -> Section:
    return next(each for each in list_sections(report) if each.title.startswith(start))


def find_figure(report: VerifyReport, start: str, title: str) -> Figure:
    figures = find_section(report, start).figures
    return next(figure for figure in figures if figure.title == title)


def parse(figure: Figure) -> Element:
    return fromstring(figure.chart)  # noqa: S314 -- of our own making


def list_paths(figure: Figure, css: str) -> list[str]:
    paths = parse(figure).iter("path")
    return [str(path.get("d")) for path in paths if path.get("class") == css]


def draw_points(figure: Figure, css: str) -> list[tuple[float, float]]:
    """Give the places of the marks of one series."""
    (series,) = [g for g in parse(figure).iter("g") if g.get("class") == css]
    (marks,) = [path for path in series if path.get("class") == "marks"]
    numbers = re.findall(r"M([\d.]+) ([\d.-]+)", str(marks.get("d")))
    return [(float(x), float(y)) for x, y in numbers]


def draw_limits(figure: Figure) -> list[float]:
    return [float(path.split(" ")[1].split("H")[0]) for path in list_paths(figure, "limit")]


def list_texts(figure: Figure, tag: str = "text") -> list[str]:
    return [str(text.text) for text in parse(figure).iter(tag)]


def on_decibels(value: float) -> float:
    """Where a value stands on an axis from 0 to 40 dB, of which one dB is 1/40."""
    return FLOOR - value / 40 * (FLOOR - CEILING)


def test_harmless_noise_looks_flat_and_the_limit_is_drawn() -> None:
    layers = tuple(make_layer(SCALE_ONE, n, sqnr_db=db) for n, db in enumerate((30.8, 31.6)))
    figure = find_figure(make_small(layers=layers), "Signal", "Keys")
    heights = [y for _, y in draw_points(figure, BASELINE.css)]
    assert heights == pytest.approx([on_decibels(30.8), on_decibels(31.6)], abs=0.06)
    assert abs(heights[0] - heights[1]) < 5  # of 168 units
    assert draw_limits(figure) == pytest.approx([on_decibels(15)], abs=0.06)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((31.0, 17.0), (0, 40)),
        ((52.5,), (0, 60)),
        ((-3.0,), (-10, 40)),
        ((None,), (0, 40)),
    ],
)
def test_an_axis_is_longer_where_values_need_it(
    values: tuple[float | None, ...], ends: tuple[float, float]
) -> None:
    axis = db_axis(values)
    assert (axis.low, axis.high) == ends
    assert [value for value, _ in axis.ticks] == list(range(int(ends[0]), int(ends[1]) + 1, 10))


@pytest.mark.parametrize(("values", "top"), [((0.5, None), 1.0), ((20.0,), 100.0), ((0.0,), 1.0)])
def test_a_log_axis_is_longer_upwards_and_names_what_is_at_its_end(
    values: tuple[float | None, ...], top: float
) -> None:
    axis = log_axis("x", values, low=-4, high=0)
    assert (axis.low, axis.high) == (1e-4, top)
    assert axis.ticks[0] == (1e-4, "\u2264 1e-4")
    assert axis.y(0.0) == FLOOR


def test_every_candidate_has_its_line_and_none_where_it_quantizes_nothing() -> None:
    layers = (
        make_layer("out/overlay", 0, sqnr_db=30.5),
        make_layer(SCALE_ONE, 0, sqnr_db=12.5),
        make_layer(SCALE_ONE, 0, sqnr_db=9.5, role="q", site="model.layers.0.self_attn.q"),
    )
    report = make_small(layers=layers)
    keys, queries = (find_figure(report, "Signal", name) for name in ("Keys", "Queries"))
    assert [name for _, name in keys.legend] == ["out/overlay", SCALE_ONE]
    assert [name for _, name in queries.legend] == [SCALE_ONE]
    (tip,) = list_texts(keys, "title")
    assert str(tip).startswith("layer 0\nout/overlay: 30.5 dB, amax 896, scale 2, 0.000% clipped")


def test_a_gap_is_left_where_nothing_was_lost() -> None:
    layers = [make_layer(SCALE_ONE, n, sqnr_db=db) for n, db in enumerate((30.0, None, 30.0))]
    figure = find_figure(make_small(layers=tuple(layers)), "Signal", "Keys")
    (line,) = list_paths(figure, "line")
    assert line.count("M") == 2
    step = (RIGHT - LEFT) / 3
    assert [x for x, _ in draw_points(figure, BASELINE.css)] == pytest.approx(
        [LEFT + step / 2, LEFT + 2.5 * step], abs=0.06
    )


def test_nothing_is_drawn_where_nothing_is_lost() -> None:
    layers = (
        make_layer(SCALE_ONE, 0, sqnr_db=None),
        make_layer(SCALE_ONE, 0, role="v", site="model.layers.0.self_attn.v"),
    )
    section = find_section(make_small(layers=layers), "Signal")
    assert [figure.title for figure in section.figures] == ["Values"]
    assert section.findings == [
        "Keys: nothing is lost, in any layer of any candidate.",
        "Values: scale 1.0 fits every layer.",
    ]


def test_of_the_linears_of_a_layer_the_worst_is_shown() -> None:
    sites = ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "self_attn.q_proj")
    layers = tuple(
        make_layer("a", 3, role="input", site=f"model.layers.3.{site}.input", sqnr_db=db)
        for site, db in zip(sites, (30.0, 12.0, None), strict=True)
    )
    report = make_small(candidates=(make_candidate("a"),), layers=layers)
    figure = find_figure(report, "Signal", "Inputs")
    assert [y for _, y in draw_points(figure, STYLES[0].css)] == pytest.approx([on_decibels(12)])
    assert "a: 12.0 dB" in list_texts(figure, "title")[0]


def test_a_divergence_of_zero_is_a_gap_on_a_log_axis() -> None:
    positions = make_candidate("a").by_position
    later = positions[0].model_copy(update={"first": 2, "last": 3, "kld_mean": 0.0})
    report = make_small(candidates=(make_candidate("a", by_position=(*positions, later)),))
    figure = find_figure(report, "KL divergence", "Mean KL divergence")
    decade = (FLOOR - CEILING) / 6
    ((_, height),) = draw_points(figure, STYLES[0].css)
    assert height == pytest.approx(FLOOR - (math.log10(0.5) + 6) * decade, abs=0.06)
    tips = [text.split("\n")[0] for text in list_texts(figure, "title")]
    assert tips == ["positions 1 to 1", "positions 2 to 3"]


def test_an_interval_is_a_standard_error_to_both_sides() -> None:
    row = PositionResult(first=1, last=1, tokens=4, kld_mean=1e-2, kld_se=9e-3, ppl_ratio=1.1)
    report = make_small(candidates=(make_candidate("a", by_position=(row,)),))
    figure = find_figure(report, "KL divergence", "Mean KL divergence")
    (interval,) = list_paths(figure, "error")
    ends = [float(number) for number in re.findall(r"[ V]([\d.]+)", interval)]
    decade = (FLOOR - CEILING) / 5  # 1e-6 to 0.1
    wanted = [FLOOR - (math.log10(value) + 6) * decade for value in (1e-3, 1.9e-2)]
    assert ends == pytest.approx(wanted, abs=0.06)


def make_histogram(**more: Any) -> HistogramResult:
    values: dict[str, Any] = {
        "site": "model.layers.4.self_attn.v",
        "layer": 4,
        "lower_edges_log2": (-1.0, -0.875, -0.75),
        "counts": (3, 0, 1),
        "scale": 0.5,
        "largest": 224.0,
        "smallest": 2.0**-11,
    }
    return HistogramResult(**values | more)


def test_a_histogram_has_the_range_of_the_format_drawn_in() -> None:
    report = make_small(histograms=(make_histogram(largest=256.0),))
    figure = find_figure(report, "Magnitudes", "model.layers.4.self_attn.v")
    octave = (RIGHT - LEFT) / 30  # log2(|x| / scale) from -16 to 14
    shades = list_paths(figure, "lost")
    found = [float(number) for shade in shades for number in re.findall(r"[MH]([\d.]+)", shade)[:2]]
    ends = [LEFT, LEFT + 6 * octave, LEFT + 25 * octave, RIGHT]  # -10 and 9 are the borders
    assert found == pytest.approx(ends, abs=0.06)
    (bars,) = list_paths(figure, "bar c0")
    decade = (FLOOR - CEILING) / 7  # 1e-7 to 1
    corners = [float(number) for number in re.findall(r"[VH]([\d.]+)", bars)]
    most, quarter = (FLOOR - (math.log10(share) + 7) * decade for share in (0.75, 0.25))
    edges = [LEFT + (16 + at) * octave for at in (0, 0.125, 0.25, 0.375)]  # -1 is 0 of scale 0.5
    wanted = [most, edges[1], FLOOR, edges[2], quarter, edges[3], FLOOR]
    assert corners == pytest.approx(wanted, abs=0.06)
    assert any("zero below 0.00049, clips above 256" in t for t in list_texts(figure))


def test_the_range_of_scale_one_is_drawn_beside_that_of_the_scale() -> None:
    """Of scale 1/2 it is an octave further to the right: 2**-10 is -9, 512 is 10 there."""
    row = make_histogram(smallest=2.0**-11, largest=256.0)
    figure = find_figure(make_small(histograms=(row,)), "Magnitudes", row.site)
    octave = (RIGHT - LEFT) / 30
    ends = [float(path[1:].split(" ")[0]) for path in list_paths(figure, "limit")]
    assert ends == pytest.approx([LEFT + 7 * octave, LEFT + 26 * octave], abs=0.06)


def test_the_ends_of_a_histogram_hold_what_is_beyond_them() -> None:
    """Bins begin at -16.25, -16.125, ..., 14.125, and the axis is that from -16 to 14."""
    edges = tuple(-16.25 + number / 8 for number in range(244))
    counts = (1, 1, 1, *[0] * 238, 1, 1, 1)
    row = make_histogram(scale=1.0, lower_edges_log2=edges, counts=counts)
    figure = find_figure(make_small(histograms=(row,)), "Magnitudes", row.site)
    (bars,) = list_paths(figure, "bar c0")
    steps = [(float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", bars)]
    half = FLOOR - (math.log10(0.5) + 7) * (FLOOR - CEILING) / 7
    width = (RIGHT - LEFT) / 240
    assert steps[0] == pytest.approx((half, LEFT + width), abs=0.06)
    assert steps[-2][1] == pytest.approx(RIGHT - width, abs=0.06)
    assert steps[-1] == pytest.approx((half, RIGHT), abs=0.06)
    assert {y for y, _ in steps[1:-1]} == {FLOOR}
    assert len(steps) == 240


def test_the_histograms_of_the_worst_sites_come_first_and_are_linked() -> None:
    sites = [(10, "v"), (9, "v"), (10, "k"), (9, "k")]
    rows = tuple(
        make_histogram(site=f"m.{layer}.attn.{role}", layer=layer) for layer, role in sites
    )
    worst = make_layer(SCALE_ONE, 10, site="m.10.attn.v", role="v", sqnr_db=9.0)
    report = make_small(histograms=rows, layers=(worst,))
    figures = find_section(report, "Magnitudes").figures
    titles = ["m.10.attn.v", "m.9.attn.k", "m.10.attn.k", "m.9.attn.v"]
    assert [figure.title for figure in figures] == titles
    table = find_section(report, "The worst sites").table
    assert table is not None
    page = render_page(report)
    assert f'<a href="#{figures[0].anchor}">m.10.attn.v</a>' in page
    assert re.findall(r'<strong class="bad">(.*?)</strong>', page) == ["! 9.0"]


def test_the_diagnosis_draws_per_head_scales_only_where_they_are_known() -> None:
    row = DiagnosisResult(
        site="model.layers.0.self_attn.k",
        layer=0,
        unscaled_db=17.0,
        unscaled_clipped=0.01,
        unscaled_flushed=0.0,
        fitted_db=32.0,
        scaled_db=31.0,
        per_head_db=None,
    )
    layers = (make_layer(SCALE_ONE, 0, sqnr_db=17.0),)
    figure = find_figure(make_small(diagnosis=(row,), layers=layers), "Signal", "Keys")
    assert [name for _, name in figure.legend] == [SCALE_ONE, "fitted power of two"]
    styles = [style.css for style, _ in figure.legend]
    heights = [draw_points(figure, css)[0][1] for css in styles]
    assert heights == pytest.approx([on_decibels(17), on_decibels(32)], abs=0.06)


def test_the_layers_that_scale_one_does_not_fit_are_named() -> None:
    layers = (
        make_layer(SCALE_ONE, 0),
        make_layer(SCALE_ONE, 1),
        make_layer(SCALE_ONE, 0, role="v", site="model.layers.0.self_attn.v"),
    )
    diagnosis = tuple(
        DiagnosisResult(
            site=row.site,
            layer=row.layer,
            unscaled_db=20.0,
            unscaled_clipped=0.0,
            unscaled_flushed=0.0,
            scaled_db=None,
            per_head_db=None,
        )
        for row in layers
    )
    need = KvNeed(
        answer="yes",
        sites=(layers[1].site,),
        layers=(1,),
        fp8_kld=0.1,
        fp8_kld_se=None,
        added_by_one=None,
        removed=(),
    )
    section = find_section(make_small(layers=layers, diagnosis=diagnosis, kv=need), "Signal")
    assert section.findings == [
        "Keys: scale 1.0 does not fit layer 1.",
        "Values: scale 1.0 fits every layer.",
    ]


def test_scale_one_looks_the_same_in_every_report_and_no_two_candidates_look_alike() -> None:
    names = [*(f"c{index}" for index in range(12)), SCALE_ONE]
    layers = tuple(make_layer(name, 0) for name in names)
    report = make_small(candidates=tuple(map(make_candidate, names)), layers=layers)
    styles = {name: style for style, name in find_figure(report, "Signal", "Keys").legend}
    assert styles[SCALE_ONE] == BASELINE
    assert len(set(styles.values())) == 13
