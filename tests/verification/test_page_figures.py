"""What the plots draw, by number; and that plotly takes every one of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fp8calib.verification.html.plots import BASELINE, STYLES, View, log_axis, make_series
from fp8calib.verification.html.sections import make_sections
from fp8calib.verification.report import (
    SCALE_ONE,
    DiagnosisResult,
    HistogramResult,
    Sensitivity,
    SensitivityResult,
    VerifyReport,
)
from tests.verification.sample_report import make_report
from tests.verification.test_page import make_candidate, make_layer, make_small


def views_of(report: VerifyReport) -> dict[str, list[View]]:
    return {p.name: list(p.views) for section in make_sections(report) for p in section.plots}


def traces_of(report: VerifyReport, name: str) -> list[dict[str, Any]]:
    (view,) = views_of(report)[name]
    return list(view.data)


def test_plotly_takes_every_view() -> None:
    objects = pytest.importorskip("plotly.graph_objects")
    views = [view for views in views_of(make_report()).values() for view in views]
    assert len(views) == 78
    for view in views:
        objects.Figure(data=view.data, layout=view.layout)


def test_the_range_is_amax_in_units_of_the_scale() -> None:
    layers = (
        make_layer("a", 1, amax=10.0, scale=4.0),
        make_layer("a", 0, amax=896.0, scale=2.0),
        make_layer("a", 2, amax=1.0, scale=None),
    )
    (trace,) = traces_of(make_small(candidates=(make_candidate("a"),), layers=layers), "range-k")
    assert (trace["x"], trace["y"]) == ([0, 1, 2], [448.0, 2.5, None])


@pytest.mark.parametrize(("largest", "lines"), [(None, [448]), (480.0, [240]), (896.0, [448])])
def test_the_line_above_which_values_clip_is_the_formats(
    largest: float | None, lines: list[float]
) -> None:
    histograms = () if largest is None else (make_histogram(scale=2.0, largest=largest),)
    report = make_small(layers=(make_layer(SCALE_ONE, 0),), histograms=histograms)
    (view,) = views_of(report)["range-k"]
    assert [shape["y0"] for shape in view.layout["shapes"]] == lines


def test_every_candidate_has_its_line_and_none_where_it_quantizes_nothing() -> None:
    layers = (
        make_layer("out/overlay", 0, sqnr_db=30.5),
        make_layer(SCALE_ONE, 0, sqnr_db=12.5),
        make_layer(SCALE_ONE, 0, sqnr_db=9.5, role="q", site="model.layers.0.self_attn.q"),
    )
    report = make_small(layers=layers)
    assert [(t["name"], t["y"]) for t in traces_of(report, "sqnr-k")] == [
        ("out/overlay", [30.5]),
        (SCALE_ONE, [12.5]),
    ]
    assert [(t["name"], t["y"]) for t in traces_of(report, "sqnr-q")] == [(SCALE_ONE, [9.5])]


def test_losses_are_drawn_where_there_are_some_and_said_where_there_are_none() -> None:
    layers = (make_layer(SCALE_ONE, 0), make_layer(SCALE_ONE, 1, clipped=0.125))
    report = make_small(layers=layers)
    (section,) = [s for s in make_sections(report) if s.title == "Values lost"]
    assert [plot.name for plot in section.plots] == ["clipped-k"]
    assert section.plots[0].views[0].data[0]["y"] == [0.0, 0.125]
    assert section.findings == ["Keys: nothing flushed to zero, in any layer of any candidate."]


def test_experts_share_a_cell_and_the_worst_of_them_is_shown() -> None:
    sites = ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "self_attn.q_proj")
    layers = tuple(
        make_layer("a", 3, role="input", site=f"model.layers.3.{site}.input", sqnr_db=db)
        for site, db in zip(sites, (30.0, 20.0, None), strict=True)
    )
    report = make_small(candidates=(make_candidate("a"),), layers=layers)
    (trace,) = traces_of(report, "linear-sqnr")
    assert (trace["x"], trace["y"]) == ([3], ["mlp.experts.*.up_proj", "self_attn.q_proj"])
    assert trace["z"] == [[20.0], [None]]


def test_positions_are_ranges_and_a_divergence_of_zero_is_a_gap_on_a_log_axis() -> None:
    positions = make_candidate("a").by_position
    later = positions[0].model_copy(update={"first": 2, "last": 3, "kld_mean": 0.0})
    report = make_small(candidates=(make_candidate("a", by_position=(*positions, later)),))
    (trace,) = traces_of(report, "positions")
    assert (trace["x"], trace["y"]) == (["1", "2\u20133"], [0.5, None])


def make_histogram(**more: Any) -> HistogramResult:
    values: dict[str, Any] = {
        "site": "model.layers.4.self_attn.v",
        "layer": 4,
        "lower_edges_log2": (-math.inf, -1.0, -0.875, -0.75),
        "counts": (1, 2, 0, 1),
        "scale": 0.5,
        "largest": 224.0,
        "smallest": 2.0**-11,
    }
    return HistogramResult(**values | more)


def test_a_histogram_has_the_range_of_the_format_drawn_in() -> None:
    (view,) = views_of(make_small(histograms=(make_histogram(largest=256.0),)))["histogram"]
    assert view.label == "model.layers.4.self_attn.v"
    assert (view.data[0]["x"], view.data[0]["y"]) == ([-0.9375, -0.6875], [0.5, 0.25])
    lines = [shape["x0"] for shape in view.layout["shapes"] if shape["type"] == "line"]
    shades = [(s["x0"], s["x1"]) for s in view.layout["shapes"] if s["type"] == "rect"]
    assert lines == [-11.0, 8.0]
    assert shades == [(-12.0, -11.0), (8.0, 9.0)]
    assert [note["text"] for note in view.layout["annotations"]] == [
        "zero below 0.0004883",
        "clips above 256",
    ]


def test_stepping_through_histograms_walks_through_the_layers_of_one_role() -> None:
    sites = [(10, "v"), (9, "v"), (10, "k"), (9, "k")]
    rows = tuple(
        make_histogram(site=f"m.{layer}.attn.{role}", layer=layer) for layer, role in sites
    )
    views = views_of(make_small(histograms=rows))["histogram"]
    assert [view.label for view in views] == [
        "m.9.attn.k",
        "m.10.attn.k",
        "m.9.attn.v",
        "m.10.attn.v",
    ]


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
    report = make_small(diagnosis=(row,))
    lines = [(trace["name"], trace["y"]) for trace in traces_of(report, "diagnosis-k")]
    assert lines == [("scale 1.0", [17.0]), ("one scale per tensor", [31.0])]


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
        for layer, kld in enumerate((0.125, 0.5))
    )
    sensitivity = Sensitivity(
        candidate="a", sequences=2, layers=layers, skip_layers=skipped, flag=flag
    )
    sections = make_sections(make_small(sensitivity=sensitivity))
    (section,) = [s for s in sections if s.title.startswith("Sensitivity")]
    bars = {t["name"]: (t["x"], t["y"]) for t in section.plots[0].views[0].data}
    assert bars == (
        {"leave unquantized": ([1], [0.5]), "quantize": ([0], [0.125])}
        if skipped
        else {"quantize": ([0, 1], [0.125, 0.5])}
    )
    assert section.findings == [said]


@pytest.mark.parametrize(("num_layers", "ticks"), [(2, 1), (9, 1), (10, None), (80, None)])
def test_no_tick_stands_between_two_layers(num_layers: int, ticks: int | None) -> None:
    layers = tuple(make_layer(SCALE_ONE, layer) for layer in range(num_layers))
    (view,) = views_of(make_small(layers=layers))["sqnr-k"]
    assert view.layout["xaxis"].get("dtick") == ticks


def test_rules_keep_their_ranks_and_their_errors() -> None:
    (trace,) = traces_of(make_report(), "rules")
    assert trace["y"] == ["1. mse", "2. amax", "3. headroom:1.25", "4. percentile:99.9"]
    assert trace["x"] == [1.0006, 1.0011, 1.0013, 1.0097]
    assert trace["error_x"]["array"] == [0.0006, 0.0006, 0.0007, 0.0021]


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


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([20.0, 50.0, None], {"nticks": 6, "range": [1.0, 2.0]}),
        ([1.0, 1000.0], {"dtick": "D2"}),
        ([1e-6, 1.0, 0.0], {"dtick": 1}),
        ([1e-12, 1.0], {"dtick": 2}),
        ([None], {"nticks": 6, "range": [math.log10(0.5), math.log10(2.0)]}),
    ],
)
def test_a_log_axis_has_some_ticks_and_not_too_many(
    values: list[float | None], ticks: dict[str, Any]
) -> None:
    assert {k: v for k, v in log_axis("x", values).items() if k not in {"title", "type"}} == {
        "tickformat": ".4~g",
        **ticks,
    }
