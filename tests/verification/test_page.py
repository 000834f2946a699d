"""The page as a file: what its HTML holds, what it escapes, that it asks nothing of any network."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import pytest
from markupsafe import Markup

from fp8calib.text import Table
from fp8calib.verification.page.charts import (
    BASELINE,
    FLOOR,
    LEFT,
    RIGHT,
    STYLES,
    TOP,
    Figure,
    histogram,
    log_axis,
)
from fp8calib.verification.page.page import PageSection, list_sections, render_page, write_page
from fp8calib.verification.report import (
    SCALE_ONE,
    Decision,
    LayerResult,
    PositionResult,
    RunProvenance,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.tables import candidates_table
from tests.kit.reports import make_candidate, make_layer, make_small
from tests.verification.sample_report import OVERLAY, make_report

LOADERS = {"src", "srcset", "data", "poster", "action", "background", "xlink:href"}
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&amp;"


class Reader(HTMLParser):
    """Keep a page's elements, the text outside of code, and the code by element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.code: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Note text by the element that was opened last."""
        tag = self.elements[-1][0] if self.elements else ""
        if tag in self.code:
            self.code[tag] += [data] if data.strip() else []
        elif data.strip():
            self.words.append(data.strip())
            self.headings += [data] if tag in {"h2", "summary"} else []


def read(report: VerifyReport, command: str = "") -> Reader:
    return Reader(render_page(report, command=command))


# --- what it says ------------------------------------------------------------------------------

CLIPS = Decision(headline="Use a, which passes.", details="a: model.layers.3.self_attn.k clips.")
PROVENANCE = RunProvenance(
    date="2026-01-02T03:04:05+00:00",
    command="fp8calib verify the/model",
    model_hash="ab" * 32,
    data_hash="cd" * 32,
    versions={"fp8calib": "9.9", "torch": "2.x"},
)
LOST = Table(
    title="Texts that lose most with a",
    columns=["sequence", "KLD mean", "worst token", "its KLD", "text before it"],
    rows=[["3", "0.5000", "typed", "7.2500", "... as"]],
    words=(2, 4),
)
SAYS: dict[str, tuple[VerifyReport, str, int, list[str]]] = {
    # the report, a word of the page, how far behind it words begin, and these words
    "the conclusion": (
        make_small(decision=CLIPS), "the/model", 0,
        ["the/model", "Use a, which passes.", "a: model.layers.3.self_attn.k clips.",
         "vllm serve a"],
    ),
    "the figures of a verdict": (
        make_small(has_gate=True), "Same token", 1,
        ["out/overlay", "KV cache", "! warn", "between 1.01 and 1.05 (kv gate)",
         "0.0671 \u00b1 0.0034", "0.8920", "1.0123 \u00b1 0.0045", "92.87%"],
    ),
    "what it was made from": (
        make_small(provenance=PROVENANCE), "Provenance", 1,
        ["Versions", "fp8calib 9.9, torch 2.x", "Date", "2026-01-02T03:04:05+00:00",
         "Command", "fp8calib verify the/model", "Run", "62 s on cpu",
         "Hash of the model", "ab" * 32, "Hash of the text", "cd" * 32],
    ),
    "texts that lose": (
        make_small(worst_texts=LOST), "Texts that lose most with a", 6,
        ["3", "0.5000", "typed", "7.2500", "... as"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("report", "after", "skip", "expected"), SAYS.values(), ids=SAYS)
def test_the_page_says(report: VerifyReport, after: str, skip: int, expected: list[str]) -> None:
    words = read(report, command="vllm serve a").words
    first = words.index(after) + skip
    assert words[first : first + len(expected)] == expected
    run = "vLLM 9.8.7, emulated \u00b7 4,095 tokens in 3 sequences (one.jsonl, two.txt)"
    assert any(word.startswith(run) for word in words)


def test_without_a_gate_the_table_has_no_verdict_and_its_numbers_stay_numbers() -> None:
    plain, gated = (candidates_table(make_small(has_gate=gate)) for gate in (False, True))
    assert plain.columns == [each for each in gated.columns if each != "verdict"]
    kinds = [gated.kind_of(gated.columns.index(each)) for each in plain.columns]
    assert [plain.kind_of(index) for index in range(len(plain.columns))] == kinds


BADGES = {
    Verdict.PASS: "\u2713 pass",
    Verdict.WARN: "! warn",
    Verdict.FAIL: "\u2715 fail",
    Verdict.NO_DIFFERENCE: "= no difference",
    Verdict.CANNOT_TELL: "? cannot tell",
}


def test_a_verdict_is_a_word_and_not_a_colour_alone() -> None:
    candidates = tuple(make_candidate(str(verdict), verdict=verdict) for verdict in BADGES)
    reader = read(make_small(candidates=candidates, has_gate=True))
    assert [word for word in reader.words if word in BADGES.values()] == list(BADGES.values())
    badges = [a["class"] for _, a in reader.elements if "badge" in str(a.get("class"))]
    assert badges == [f"badge {verdict}" for verdict in BADGES]


def test_linears_that_read_one_input_share_a_row() -> None:
    def row(linear: str, amax: float = 3.0, layer: int = 4) -> LayerResult:
        site = f"model.layers.{layer}.self_attn.{linear}.input"
        return make_layer("out/overlay", layer, "input", site=site, amax=amax)

    rows = (row("q_proj"), row("k_proj"), row("q_proj", layer=5), row("v_proj", amax=2.0))
    words = read(make_small(layers=rows)).words
    assert [word for word in words if word.endswith((".input", ")"))] == [
        "model.layers.4.self_attn.q_proj.input (and k_proj)",
        "model.layers.5.self_attn.q_proj.input",
        "model.layers.4.self_attn.v_proj.input",
    ]


KLDS, END = "KLD by sequence and by position", "Provenance"
ALL = [
    *("Warnings", KLDS, f"Texts that lose most with {OVERLAY}"),
    *("SQNR by layer", "Tensors that lose most", "Scale rules", END),
]
ONE_LAYER = make_small(layers=(make_layer("out/overlay", 0),))


@pytest.mark.parametrize(
    ("report", "headings"),
    [
        (make_report(), ALL),
        (make_small(), [KLDS, END]),
        (ONE_LAYER, [KLDS, "Tensors of lowest SQNR", END]),
    ],
)
def test_a_page_has_the_parts_that_its_report_has(
    report: VerifyReport, headings: list[str]
) -> None:
    page = Reader(render_page(report))
    assert page.headings == headings


# --- what it is made of ------------------------------------------------------------------------


def test_nothing_on_the_page_is_loaded_from_anywhere() -> None:
    reader = read(make_report())
    loads = [(tag, name) for tag, attrs in reader.elements for name in attrs if name in LOADERS]
    assert loads == []
    tags = {tag for tag, _ in reader.elements}
    assert tags & {"link", "img", "iframe", "base", "object", "embed", "script"} == set()
    assert not [attrs for _, attrs in reader.elements if "href" in attrs]
    css = "".join(reader.code["style"])
    assert re.findall(r"url\(|@import|https?:", css) == []
    policies = [a["content"] for _, a in reader.elements if a.get("http-equiv")]
    assert [str(policy).split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    hostile = make_small(
        model=HOSTILE,
        decision=Decision(headline=HOSTILE),
        data=(HOSTILE, "caf\udce9.txt"),
        warnings=(HOSTILE,),
        candidates=(make_candidate(HOSTILE, verdict_why=HOSTILE, description=HOSTILE),),
        layers=(make_layer(HOSTILE, 0, sqnr_db=9.0, clipped=0.5),),
        worst_texts=replace(LOST, rows=[["3", "0.5000", HOSTILE, "7.2500", HOSTILE]]),
    )
    write_page(hostile, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "caf?.txt" in page  # its name is no UTF-8
    reader = Reader(page)
    tags = [tag for tag, _ in reader.elements]
    assert (tags.count("script"), tags.count("img")) == (0, 0)
    assert reader.words.count(HOSTILE) == 10


def test_scale_one_is_no_choice_beside_fp8_weights_alone() -> None:
    rows = [make_layer("out/overlay", 0, role) for role in ("weight", "input")]
    rows.append(make_layer(SCALE_ONE, 0))
    page = render_page(make_small(layers=tuple(rows)))
    assert "out/overlay" in page
    assert SCALE_ONE not in page
    assert SCALE_ONE in render_page(make_small(layers=(make_layer("out/overlay", 0), rows[-1])))


# --- what the charts draw, by number -------------------------------------------------------------


DECIBEL = (FLOOR - TOP) / 40
OCTAVE = (RIGHT - LEFT) / 30
"""Of histograms, whose axis is log2(|x| / scale) from -16 to 14."""


def find_section(report: VerifyReport, start: str) -> PageSection:
    return next(each for each in list_sections(report) if each.title.startswith(start))


def find_figure(report: VerifyReport, start: str, title: str) -> Figure:
    figures = find_section(report, start).figures
    return next(figure for figure in figures if figure.title.startswith(title))


def parse(figure: Figure) -> Element:
    return fromstring(figure.chart)  # noqa: S314 -- of our own making


def list_paths(figure: Figure, css: str) -> list[str]:
    paths = parse(figure).iter("path")
    return [str(path.get("d")) for path in paths if path.get("class") == css]


def list_numbers(figure: Figure, css: str, letters: str = "MHV") -> list[float]:
    """List the coordinates after these letters in the paths of a class."""
    found = re.findall(rf"[{letters}]([\d.]+)", "".join(list_paths(figure, css)))
    return [float(number) for number in found]


def list_points(figure: Figure, css: str) -> list[tuple[float, float]]:
    (series,) = [g for g in parse(figure).iter("g") if g.get("class") == css]
    (marks,) = [path for path in series if path.get("class") == "marks"]
    numbers = re.findall(r"M([\d.]+) ([\d.-]+)", str(marks.get("d")))
    return [(float(x), float(y)) for x, y in numbers]


def list_texts(figure: Figure, tag: str = "text") -> list[str]:
    return [str(text.text) for text in parse(figure).iter(tag)]


@pytest.mark.parametrize(
    ("values", "low", "high", "first"),
    [
        ((0.5, None), 1e-2, 1.0, "0.01"),
        ((20.0, 0.003), 1e-3, 100.0, "0.001"),
        ((0.0,), 1e-2, 1.0, "0.01"),
        ((0.5, 1e-12), 1e-7, 1.0, "≤ 1e-7"),
    ],
)
def test_a_log_axis_holds_the_values_and_names_what_is_at_its_end(
    values: tuple[float | None, ...], low: float, high: float, first: str
) -> None:
    axis = log_axis("x", values)
    assert (axis.low, axis.high) == (pytest.approx(low), high)
    assert axis.ticks[0] == (pytest.approx(low), first)
    assert axis.y(0.0) == FLOOR


def test_sequences_are_sorted_and_a_divergence_of_zero_is_a_gap() -> None:
    klds = {"a": (1e-2, 1.0, 0.0, 1e-1), "b": (0.0,) * 4}
    report = make_small(candidates=(make_candidate("a"), make_candidate("b")), sequence_klds=klds)
    figure = find_figure(report, "KLD", "KLD by sequence")
    decade, step = (FLOOR - TOP) / 2, (RIGHT - LEFT) / 4
    wanted = [(LEFT + step * (n + 0.5), TOP + n * decade) for n in range(3)]
    assert list_points(figure, STYLES[0].css) == [pytest.approx(each, abs=0.06) for each in wanted]
    assert [name for _, name in figure.legend] == ["a"]
    assert list_texts(figure, "title")[1].startswith("number 2 of 4\na: 0.1000")


def test_an_interval_is_a_standard_error_to_both_sides() -> None:
    rows = [
        PositionResult(first=1, last=1, tokens=4, kld_mean=1e-2, kld_se=9e-3, ppl_ratio=1.1),
        PositionResult(first=2, last=3, tokens=8, kld_mean=0.0, ppl_ratio=1.1),
    ]
    report = make_small(candidates=(make_candidate("a", by_position=tuple(rows)),))
    figure = find_figure(report, "KLD", "KLD by position")
    ((_, height),) = list_points(figure, STYLES[0].css)
    (interval,) = list_paths(figure, "error")
    ends = [float(number) for number in re.findall(r"[ V]([\d.]+)", interval)]
    decade = (FLOOR - TOP) / 2  # 1e-4 to 0.01, and what is beyond at the end
    assert height == TOP
    assert ends == pytest.approx([TOP + decade, TOP], abs=0.06)
    tips = [text.split("\n")[0] for text in list_texts(figure, "title")]
    assert tips == ["positions 1 to 1", "positions 2 to 3"]


def test_a_layer_that_does_not_fit_is_drawn_with_the_limit_and_gaps() -> None:
    dbs = (30.0, None, 9.0, 52.5)
    layers = [make_layer(SCALE_ONE, n, sqnr_db=db, clipped=0.2) for n, db in enumerate(dbs)]
    layers.append(make_layer("out/overlay", 2, sqnr_db=31.0))
    section = find_section(make_small(layers=tuple(layers)), "SQNR")
    (figure,) = section.figures
    step = (RIGHT - LEFT) / 4
    wanted = [(0.5, 30), (2.5, 9), (3.5, 40)]  # the last is at the end of the axis
    assert list_points(figure, BASELINE.css) == [
        pytest.approx((LEFT + step * x, FLOOR - DECIBEL * db), abs=0.06) for x, db in wanted
    ]
    (line, _) = sorted(list_paths(figure, "line"), key=len, reverse=True)
    assert line.count("M") == 2
    (limit,) = re.findall(r" ([\d.]+)H", list_paths(figure, "limit")[0])
    assert float(limit) == pytest.approx(FLOOR - DECIBEL * 15, abs=0.06)
    assert [name for _, name in figure.legend] == ["out/overlay", SCALE_ONE]
    assert list_texts(figure, "title")[2] == "layer 2\nout/overlay: 31.0 dB\nscale-1.0: 9.0 dB"


def test_nothing_is_drawn_where_nothing_is_lost() -> None:
    layers = (
        make_layer(SCALE_ONE, 0, sqnr_db=None),
        make_layer(SCALE_ONE, 0, "v"),
        *(make_layer(SCALE_ONE, n, "q", sqnr_db=30.0 if n else 9.0, clipped=0.5) for n in (0, 1)),
    )
    section = find_section(make_small(layers=layers[:2]), "SQNR")
    assert section.figures == []
    section = find_section(make_small(layers=layers), "SQNR")
    assert [figure.title for figure in section.figures] == ["Queries"]


def draw_histogram(counts: dict[float, int] | None = None, scale: float = 0.5) -> Figure:
    return histogram("v", counts or {-1.0: 3, -0.875: 0, -0.75: 1}, scale, (2.0**-11, 256.0))


def test_a_histogram_has_the_ranges_of_its_scale_and_of_scale_one() -> None:
    """Scale 1/2: its range is shaded from -10 and to 9; that of 1.0, dashed, is -9 to 10."""
    figure = draw_histogram()
    shades = [list_numbers(figure, "lost", "MH")[n] for n in (0, 1, 3, 4)]
    ends = [LEFT, LEFT + 6 * OCTAVE, LEFT + 25 * OCTAVE, RIGHT]
    assert shades == pytest.approx(ends, abs=0.06)
    dashed = [LEFT + 7 * OCTAVE, LEFT + 26 * OCTAVE]
    assert list_numbers(figure, "limit", "M") == pytest.approx(dashed, abs=0.06)
    decade = (FLOOR - TOP) / 7  # 1e-7 to 1
    most, quarter = (FLOOR - (math.log10(share) + 7) * decade for share in (0.75, 0.25))
    edges = [LEFT + (16 + at) * OCTAVE for at in (0, 0.125, 0.25, 0.375)]  # -1 is 0 of scale 0.5
    wanted = [most, edges[1], FLOOR, edges[2], quarter, edges[3], FLOOR]
    assert list_numbers(figure, "bar c0", "VH") == pytest.approx(wanted, abs=0.06)
    assert any("zero below 0.00049, clips above 256" in text for text in list_texts(figure))


def test_the_ends_of_a_histogram_hold_what_is_beyond_them() -> None:
    """Bins begin at -16.25, -16.125, ..., 14.125, and the axis is that from -16 to 14."""
    counts = {-16.25 + n / 8: int(n < 3 or n > 240) for n in range(244)}
    (bars,) = list_paths(draw_histogram(counts, 1.0), "bar c0")
    steps = [(float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", bars)]
    half = FLOOR - (math.log10(0.5) + 7) * (FLOOR - TOP) / 7
    width = (RIGHT - LEFT) / 240
    assert steps[0] == pytest.approx((half, LEFT + width), abs=0.06)
    assert steps[-2][1] == pytest.approx(RIGHT - width, abs=0.06)
    assert steps[-1] == pytest.approx((half, RIGHT), abs=0.06)
    assert {y for y, _ in steps[1:-1]} == {FLOOR}
    assert len(steps) == 240


def test_the_three_tensors_that_lose_most_have_histograms_and_the_others_none() -> None:
    layers = [
        make_layer(SCALE_ONE, n, sqnr_db=db, clipped=0.0 if db > 20 else 0.5)
        for n, db in enumerate((31.0, 12.0, 9.0, 14.0, 7.0, 31.0))
    ]
    rows = {row.site: Figure(title=row.site, chart=Markup()) for row in layers}
    section = find_section(make_small(layers=tuple(layers), histograms=rows), "Tensors")
    assert section.title == "Tensors that lose most"
    assert [figure.title for figure in section.figures] == [layers[n].site for n in (4, 2, 1)]
    assert section.table is not None
    assert [str(row[0]) for row in section.table.rows] == [layers[n].site for n in (4, 2, 1, 3)]
    fitting = make_small(layers=(layers[0], layers[5]), histograms=rows)
    section = find_section(fitting, "Tensors of lowest SQNR")
    assert (section.is_folded, section.figures) == (True, [])
