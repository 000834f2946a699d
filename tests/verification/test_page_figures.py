"""What the charts draw, by number: positions read back from the SVG against ones worked out."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree.ElementTree import Element

import pytest

from fp8calib.render.page.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    linear_axis,
    log_axis,
)
from fp8calib.render.page.page import list_sections, render_page
from fp8calib.render.page.sections import Figure, PageSection
from fp8calib.render.page.series import BASELINE, STYLES, make_series
from fp8calib.verification.report import (
    SCALE_ONE,
    DiagnosisResult,
    HistogramResult,
    KvNeed,
    Sensitivity,
    SensitivityResult,
    VerifyReport,
)
from tests.kit.reports import make_candidate, make_layer, make_small

FLOOR, CEILING = HEIGHT - BOTTOM, TOP


def find_section(report: VerifyReport, start: str) -> PageSection:
    sections = list_sections(report, make_series(report))
    return next(section for section in sections if section.title.startswith(start))


def find_figure(report: VerifyReport, start: str, title: str) -> Figure:
    figures = find_section(report, start).figures
    return next(figure for figure in figures if figure.title == title)


def draw_points(figure: Figure, group: str) -> list[tuple[float, float]]:
    """Give the corners of one line."""
    (line,) = [g for g in figure.chart.iter("g") if group in str(g.get("class")).split()]
    numbers = re.findall(r"[ML]([\d.]+) ([\d.-]+)", str(line[0].get("d")))
    return [(float(x), float(y)) for x, y in numbers]


def draw_limits(figure: Figure) -> list[float]:
    lines = [path for path in figure.chart.iter("path") if path.get("class") == "limit"]
    return [float(str(line.get("d")).split(" ")[1].split("H")[0]) for line in lines]


def list_texts(chart: Element) -> list[str]:
    return [str(text.text) for text in chart.iter("text")]


def on_decibels(value: float) -> float:
    """Where a value stands on an axis from 0 to 40 dB, of which one dB is 1/40."""
    return FLOOR - value / 40 * (FLOOR - CEILING)


def test_harmless_noise_looks_flat_and_the_limit_is_drawn() -> None:
    layers = tuple(make_layer(SCALE_ONE, n, sqnr_db=db) for n, db in enumerate((30.8, 31.6)))
    figure = find_figure(make_small(layers=layers), "Signal", "Keys")
    heights = [y for _, y in draw_points(figure, "s1")]
    assert heights == pytest.approx([on_decibels(30.8), on_decibels(31.6)], abs=0.06)
    assert abs(heights[0] - heights[1]) < 5  # of 168 units
    assert draw_limits(figure) == pytest.approx([on_decibels(15)], abs=0.06)


def test_a_tiny_share_is_far_below_the_limit_of_one_percent() -> None:
    layers = (make_layer(SCALE_ONE, 0, clipped=1.4e-4), make_layer(SCALE_ONE, 1))
    figure = find_figure(make_small(layers=layers), "Values lost", "Keys: clipped")
    (_, height), (_, zero) = draw_points(figure, "s1")
    decade = (FLOOR - CEILING) / 6  # 1e-6 to 1
    assert height == pytest.approx(FLOOR - (math.log10(1.4e-4) + 6) * decade, abs=0.06)
    assert zero == FLOOR
    assert draw_limits(figure) == pytest.approx([FLOOR - 4 * decade], abs=0.06)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((31.0, 17.0), (0, 40)),
        ((52.5,), (0, 60)),
        ((-3.0,), (-10, 40)),
        ((None, math.inf), (0, 40)),
    ],
)
def test_an_axis_is_longer_where_values_need_it(
    values: tuple[float | None, ...], ends: tuple[float, float]
) -> None:
    axis = linear_axis("dB", values, low=0, high=40, step=10)
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


def test_the_range_is_amax_in_units_of_the_scale() -> None:
    layers = (
        make_layer("a", 1, amax=10.0, scale=4.0),
        make_layer("a", 0, amax=896.0, scale=2.0),
        make_layer("a", 2, amax=1.0, scale=None),
    )
    report = make_small(candidates=(make_candidate("a"),), layers=layers)
    figure = find_figure(report, "Range", "Keys")
    decade = (FLOOR - CEILING) / 6  # 0.01 to 10000
    heights = [y for _, y in draw_points(figure, "s0")]
    wanted = [FLOOR - (math.log10(value) + 2) * decade for value in (448.0, 2.5)]
    assert heights == pytest.approx(wanted, abs=0.06)
    assert draw_limits(figure) == pytest.approx([wanted[0]], abs=0.06)


@pytest.mark.parametrize(("largest", "name"), [(None, "448"), (480.0, "240"), (896.0, "448")])
def test_the_line_above_which_values_clip_is_the_formats(largest: float | None, name: str) -> None:
    histograms = () if largest is None else (make_histogram(scale=2.0, largest=largest),)
    report = make_small(layers=(make_layer(SCALE_ONE, 0),), histograms=histograms)
    texts = list_texts(find_figure(report, "Range", "Keys").chart)
    assert [text.split(":")[0] for text in texts if "the largest" in text] == [name]


def test_every_candidate_has_its_line_and_none_where_it_quantizes_nothing() -> None:
    layers = (
        make_layer("out/overlay", 0, sqnr_db=30.5),
        make_layer(SCALE_ONE, 0, sqnr_db=12.5),
        make_layer(SCALE_ONE, 0, sqnr_db=9.5, role="q", site="model.layers.0.self_attn.q"),
    )
    report = make_small(layers=layers)
    keys, queries = (find_figure(report, "Signal", name) for name in ("Keys", "Queries"))
    assert [g.get("class") for g in keys.chart.iter("g")] == ["c0 s0", "base s1"]
    assert [g.get("class") for g in queries.chart.iter("g")] == ["base s1"]
    (tip,) = [title.text for title in keys.chart.iter("title")]
    assert str(tip).startswith("layer 0\nout/overlay: 30.5 dB, amax 896, scale 2, 0.000% clipped")


def test_a_gap_is_left_where_nothing_was_lost() -> None:
    layers = [make_layer(SCALE_ONE, n, sqnr_db=db) for n, db in enumerate((30.0, None, 30.0))]
    figure = find_figure(make_small(layers=tuple(layers)), "Signal", "Keys")
    (line,) = figure.chart.iter("g")
    assert str(line[0].get("d")).count("M") == 2
    step = (WIDTH - RIGHT - LEFT) / 3
    assert [x for x, _ in draw_points(figure, "s1")] == pytest.approx(
        [LEFT + step / 2, LEFT + 2.5 * step], abs=0.06
    )


def test_losses_are_drawn_where_there_are_some_and_said_where_there_are_none() -> None:
    layers = (make_layer(SCALE_ONE, 0), make_layer(SCALE_ONE, 1, clipped=0.125))
    section = find_section(make_small(layers=layers), "Values lost")
    assert [figure.title for figure in section.figures] == ["Keys: clipped"]
    assert section.findings == ["Keys: nothing flushed to zero, in any layer of any candidate."]


def test_experts_share_a_cell_and_the_worst_of_them_is_shown() -> None:
    sites = ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "self_attn.q_proj")
    layers = tuple(
        make_layer("a", 3, role="input", site=f"model.layers.3.{site}.input", sqnr_db=db)
        for site, db in zip(sites, (30.0, 12.0, None), strict=True)
    )
    report = make_small(candidates=(make_candidate("a"),), layers=layers)
    chart = find_figure(report, "Weights", "a: inputs").chart
    cells = [(rect.get("class"), rect[0].text) for rect in chart.iter("rect")]
    assert cells == [
        ("h0", "layer 3, mlp.experts.*.up_proj: 12.0 dB"),
        ("h4", "layer 3, self_attn.q_proj: - dB"),
    ]


def test_a_divergence_of_zero_is_a_gap_on_a_log_axis() -> None:
    positions = make_candidate("a").by_position
    later = positions[0].model_copy(update={"first": 2, "last": 3, "kld_mean": 0.0})
    report = make_small(candidates=(make_candidate("a", by_position=(*positions, later)),))
    figure = find_figure(report, "KL divergence", "Mean KL divergence")
    decade = (FLOOR - CEILING) / 6
    ((_, height),) = draw_points(figure, "s0")
    assert height == pytest.approx(FLOOR - (math.log10(0.5) + 6) * decade, abs=0.06)
    tips = [str(title.text).split(",")[0] for title in figure.chart.iter("title")]
    assert tips == ["positions 1", "positions 2\u20133"]


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
    octave = (WIDTH - RIGHT - LEFT) / 30  # log2(|x| / scale) from -16 to 14
    shades = [str(p.get("d")) for p in figure.chart.iter("path") if p.get("class") == "lost"]
    found = [float(number) for shade in shades for number in re.findall(r"[MH]([\d.]+)", shade)[:2]]
    ends = [LEFT, LEFT + 6 * octave, LEFT + 25 * octave, WIDTH - RIGHT]  # -10 and 9 are the borders
    assert found == pytest.approx(ends, abs=0.06)
    (bars,) = [str(p.get("d")) for p in figure.chart.iter("path") if p.get("class") == "bar c0"]
    decade = (FLOOR - CEILING) / 7  # 1e-7 to 1
    corners = [float(number) for number in re.findall(r"[VH]([\d.]+)", bars)]
    most, quarter = (FLOOR - (math.log10(share) + 7) * decade for share in (0.75, 0.25))
    edges = [LEFT + (16 + at) * octave for at in (0, 0.125, 0.25, 0.375)]  # -1 is 0 of scale 0.5
    wanted = [most, edges[1], FLOOR, edges[2], quarter, edges[3], FLOOR]
    assert corners == pytest.approx(wanted, abs=0.06)
    assert any("zero below 0.00049, clips above 256" in t for t in list_texts(figure.chart))


def test_the_ends_of_a_histogram_hold_what_is_beyond_them() -> None:
    """Bins begin at -16.25, -16.125, ..., 14.125, and the axis is that from -16 to 14."""
    edges = tuple(-16.25 + number / 8 for number in range(244))
    counts = (1, 1, 1, *[0] * 238, 1, 1, 1)
    row = make_histogram(scale=1.0, lower_edges_log2=edges, counts=counts)
    figure = find_figure(make_small(histograms=(row,)), "Magnitudes", row.site)
    (bars,) = [str(p.get("d")) for p in figure.chart.iter("path") if p.get("class") == "bar c0"]
    steps = [(float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", bars)]
    half = FLOOR - (math.log10(0.5) + 7) * (FLOOR - CEILING) / 7
    width = (WIDTH - RIGHT - LEFT) / 240
    assert steps[0] == pytest.approx((half, LEFT + width), abs=0.06)
    assert steps[-2][1] == pytest.approx(WIDTH - RIGHT - width, abs=0.06)
    assert steps[-1] == pytest.approx((half, WIDTH - RIGHT), abs=0.06)
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
        scaled_db=31.0,
        per_head_db=None,
    )
    figure = find_figure(make_small(diagnosis=(row,)), "Are scales", "Keys")
    assert [name for _, name in figure.legend] == ["scale 1.0", "per tensor"]
    heights = [draw_points(figure, color)[0][1] for color in ("base", "c0")]
    assert heights == pytest.approx([on_decibels(17), on_decibels(31)], abs=0.06)


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
    section = find_section(make_small(layers=layers, diagnosis=diagnosis, kv=need), "Are scales")
    assert section.findings == [
        "Keys: scale 1.0 does not fit layer 1.",
        "Values: scale 1.0 fits every layer.",
    ]


@pytest.mark.parametrize(
    ("skipped", "flag", "said"),
    [
        ((1,), "--skip 1", "To leave the layers that stand out unquantized, use --skip 1"),
        ((), "", "No layer is worth leaving unquantized: none stands out."),
    ],
)
def test_layers_worth_leaving_unquantized_stand_out(
    skipped: tuple[int, ...], flag: str, said: str
) -> None:
    layers = tuple(
        SensitivityResult(layer=layer, kld_mean=kld, ppl_ratio=1.0)
        for layer, kld in enumerate((0.01, 0.1))
    )
    sensitivity = Sensitivity(
        candidate="a", sequences=2, layers=layers, skip_layers=skipped, flag=flag
    )
    section = find_section(make_small(sensitivity=sensitivity), "Sensitivity")
    bars = [
        (path.get("class"), float(str(path.get("d")).split("V")[1].split("h")[0]))
        for path in section.figures[0].chart.iter("path")
        if "bar" in str(path.get("class"))
    ]
    decade = (FLOOR - CEILING) / 5  # 1e-6 to 0.1
    assert bars == [
        ("bar c0", pytest.approx(FLOOR - 4 * decade, abs=0.06)),
        ("bar c1" if skipped else "bar c0", CEILING),
    ]
    assert section.findings == [said]


def test_scale_one_looks_the_same_in_every_report_and_no_two_candidates_look_alike() -> None:
    names = [f"c{index}" for index in range(2 * len(STYLES))]
    report = make_small(candidates=tuple(map(make_candidate, [*names, SCALE_ONE])))
    styles = [series.style for series in make_series(report)]
    assert styles[-1] == BASELINE
    assert len(set(styles)) == 2 * len(STYLES) + 1


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["short", SCALE_ONE], ["short", SCALE_ONE]),
        (
            ["some/very/long/way/to/the/folder/kv-overlay"],
            ["\u2026/long/way/to/the/folder/kv-overlay"],
        ),
        (["x" * 40], ["\u2026" + "x" * 35]),
        (["a" + "x" * 40, "b" + "x" * 40], ["a" + "x" * 40, "b" + "x" * 40]),
    ],
)
def test_long_names_are_cut_to_their_ends_unless_the_ends_are_alike(
    names: list[str], labels: list[str]
) -> None:
    report = make_small(candidates=tuple(map(make_candidate, names)))
    assert [series.label for series in make_series(report)] == labels
