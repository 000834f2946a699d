"""The page as a file: what its HTML holds, what it escapes, that it asks nothing of any network."""

from __future__ import annotations

import json
import re
import resource
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fp8calib.errors import ExportError, UsageError
from fp8calib.verification.html.page import render_page, require_plotly, write_page
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    LayerResult,
    PositionResult,
    ReferenceResult,
    RuleResult,
    TaskResult,
    Verdict,
    VerifyReport,
)
from tests.verification.sample_report import make_report

STUB = "/* plotly.js */"
LOADERS = {"src", "href", "srcset", "data", "poster", "action", "background", "xlink:href"}
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
            self.headings += [data] if tag == "h2" else []

    @property
    def plots(self) -> list[dict[str, Any]]:
        """What the page's script draws."""
        drawn: list[dict[str, Any]] = json.loads(self.code["script"][0])
        return drawn


def read(report: VerifyReport) -> Reader:
    return Reader(render_page(report, STUB))


def make_candidate(name: str, **more: Any) -> CandidateResult:
    values: dict[str, Any] = {
        "name": name,
        "description": "KV cache",
        "ppl": 12.3456,
        "ppl_ratio": 1.0123,
        "ppl_ratio_se": 0.0045,
        "kld_mean": 0.0671,
        "kld_median": 0.0213,
        "kld_p99": 0.892,
        "kld_max": 3.45,
        "top1_agreement": 0.9287,
        "top1_ties": 0.025,
        "verdict": Verdict.WARN,
        "verdict_why": "between 1.01 and 1.05",
        "gate": "kv",
        "by_position": (PositionResult(first=1, last=1, tokens=4, kld_mean=0.5, ppl_ratio=1.1),),
    }
    return CandidateResult(**values | more)


def make_layer(candidate: str, layer: int, **more: Any) -> LayerResult:
    values: dict[str, Any] = {
        "candidate": candidate,
        "site": f"model.layers.{layer}.self_attn.k",
        "layer": layer,
        "role": "k",
        "sqnr_db": 28.25,
        "clipped": 0.0,
        "flushed": 0.0,
        "amax": 896.0,
        "scale": 2.0,
    }
    return LayerResult(**values | more)


def make_small(**more: Any) -> VerifyReport:
    """Make the least a report holds: two candidates, no layers."""
    values: dict[str, Any] = {
        "model": "the/model",
        "engine": "vllm-cpu",
        "engine_version": "vLLM 9.8.7",
        "dtype": "bfloat16",
        "device": "cpu",
        "data": ("one.jsonl", "two.txt"),
        "tokens": 4095,
        "sequences": 3,
        "seq_len": 1366,
        "duration_s": 61.5,
        "reference": ReferenceResult(ppl=12.1956),
        "candidates": (make_candidate("out/overlay"), make_candidate(SCALE_ONE)),
        "layers": (),
        "advice": "Calibrate this model.",
    }
    return VerifyReport(**values | more)


# --- what it says ------------------------------------------------------------------------------


def test_the_page_names_the_run_and_gives_the_advice() -> None:
    reader = read(make_small())
    told = {"the/model", "vllm-cpu (vLLM 9.8.7)", "one.jsonl, two.txt", "bfloat16", "12.196"}
    assert told <= set(reader.words)
    assert "4,095 in 3 sequences of up to 1,366" in reader.words
    assert "Calibrate this model." in reader.words


def test_the_table_holds_every_number_of_a_candidate() -> None:
    reader = read(make_small())
    first = reader.words.index("Top-1 ties") + 1
    assert reader.words[first : first + 12] == [
        "out/overlay",
        "KV cache",
        "! warn",
        "between 1.01 and 1.05 (gate: kv)",
        "12.346",
        "1.0123 \u00b1 0.0045",
        "0.0671",
        "0.0213",
        "0.892",
        "3.45",
        "92.87%",
        "2.50%",
    ]


@pytest.mark.parametrize(
    ("verdict", "badge"),
    [
        (Verdict.PASS, "\u2713 pass"),
        (Verdict.WARN, "! warn"),
        (Verdict.FAIL, "\u2715 fail"),
        (Verdict.NO_DIFFERENCE, "= no difference"),
    ],
)
def test_a_verdict_is_a_word_and_not_a_colour_alone(verdict: Verdict, badge: str) -> None:
    reader = read(make_small(candidates=(make_candidate("a", verdict=verdict),)))
    assert reader.words.count(badge) == 2  # above the table and in it
    assert [a["class"] for _, a in reader.elements if "badge" in str(a.get("class"))] == [
        f"badge {verdict}",
        f"badge {verdict}",
    ]


def test_what_fp64_could_not_hold_is_short() -> None:
    broken = make_candidate("a", ppl=sys.float_info.max, ppl_ratio=sys.float_info.max)
    assert {"1.7977e+308", "1.8e+308"} <= set(read(make_small(candidates=(broken,))).words)


def test_warnings_stand_before_the_plots() -> None:
    words = read(make_small(warnings=("the texts overlap",))).words
    assert words.index("Candidates") < words.index("the texts overlap")
    assert words.index("the texts overlap") < words.index("KL divergence by position")


def test_a_report_with_everything_has_every_part_in_its_order() -> None:
    assert read(make_report()).headings == [
        "Candidates",
        "Warnings",
        "Range: amax over scale",
        "Signal to quantization noise of the KV cache",
        "Values lost",
        "Weights and activations of the linear layers",
        "KL divergence by position",
        "Magnitudes and the range of the format",
        "Are scales needed?",
        "Sensitivity: one layer quantized at a time",
        "Scale rules",
        "Tasks",
    ]


def test_a_part_without_data_is_left_out() -> None:
    assert read(make_small()).headings == ["Candidates", "KL divergence by position"]


def test_a_report_with_nothing_to_draw_is_a_page_still() -> None:
    reader = read(make_small(candidates=(make_candidate("a", by_position=()),)))
    assert reader.headings == ["Candidates"]
    assert reader.plots == []


def test_rules_and_tasks_have_tables() -> None:
    rule = RuleResult(
        candidate="s.safetensors", rule="mse", ppl_ratio=1.25, ppl_ratio_se=0.5, kld_mean=0.125
    )
    task = TaskResult(
        candidate="out/overlay",
        task="arc_easy",
        metric="acc,none",
        reference=0.5,
        reference_se=0.0101,
        value=0.25,
        value_se=None,
        recovery_percent=50.0,
    )
    words = read(make_small(rules=(rule,), tasks=(task,))).words
    assert {"1. mse", "s.safetensors", "1.2500 \u00b1 0.5000", "0.125"} <= set(words)
    assert {"arc_easy", "acc,none", "0.5000 \u00b1 0.0101", "0.2500", "50.0 %"} <= set(words)


# --- what it is made of ------------------------------------------------------------------------


def test_nothing_on_the_page_is_loaded_from_anywhere() -> None:
    reader = read(make_report())
    loads = [(tag, name) for tag, attrs in reader.elements for name in attrs if name in LOADERS]
    assert loads == []
    tags = {tag for tag, _ in reader.elements}
    assert tags & {"link", "img", "iframe", "base", "object", "embed"} == set()
    css = "".join(reader.code["style"])
    assert re.findall(r"url\(|@import|https?:", css) == []
    policies = [a["content"] for _, a in reader.elements if a.get("http-equiv")]
    assert [str(policy).split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_plotly_js_stands_in_the_page_once_and_whole(tmp_path: Path) -> None:
    offline = pytest.importorskip("plotly.offline")
    write_page(make_small(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count(offline.get_plotlyjs()) == 1
    assert len(page) < len(offline.get_plotlyjs()) + 60_000


def test_names_are_text_wherever_they_stand() -> None:
    hostile = make_small(
        model=HOSTILE,
        advice=HOSTILE,
        data=(HOSTILE,),
        warnings=(HOSTILE,),
        candidates=(make_candidate(HOSTILE, verdict_why=HOSTILE, description=HOSTILE),),
        layers=(make_layer(HOSTILE, 0),),
    )
    reader = read(hostile)
    tags = [tag for tag, _ in reader.elements]
    assert (tags.count("script"), tags.count("img")) == (3, 0)
    assert reader.words.count(HOSTILE) == 7
    assert "<" not in reader.code["script"][0]


def test_plotly_reads_no_markup_in_a_name() -> None:
    report = make_small(
        candidates=(make_candidate("<b>a</b>&"),), layers=(make_layer("<b>a</b>&", 0),)
    )
    names = {t["name"] for p in read(report).plots for v in p["views"] for t in v["data"]}
    assert names == {"&lt;b&gt;a&lt;/b&gt;&amp;"}


def test_what_json_has_no_word_for_becomes_null() -> None:
    layers = (make_layer("a", 0, sqnr_db=None), make_layer("a", 1, sqnr_db=float("inf")))
    plots = read(make_small(candidates=(make_candidate("a"),), layers=layers)).plots
    (sqnr,) = [plot for plot in plots if plot["name"] == "sqnr-k"]
    assert sqnr["views"][0]["data"][0]["y"] == [None, None]


# --- writing it --------------------------------------------------------------------------------


def test_a_page_that_is_there_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "below" / "page.html"
    write_page(make_small(), path)
    write_page(make_small(advice="Something else."), path)
    assert "Something else." in path.read_text(encoding="utf-8")
    assert list(path.parent.iterdir()) == [path]


def test_the_same_report_gives_the_same_page() -> None:
    assert render_page(make_report(), STUB) == render_page(make_report(), STUB)


def test_a_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    with pytest.raises(UsageError, match="exists, and is not a regular file"):
        write_page(make_small(), tmp_path)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "page.html"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ExportError, match=r"page\.html: cannot be written"):
            write_page(make_small(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_plotly_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    with pytest.raises(UsageError) as caught:
        require_plotly()
    assert caught.value.hint == "pip install 'fp8calib[report]'"


def test_the_names_of_files_that_are_no_utf_8_do_not_stop_it(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write_page(make_small(data=("caf\udce9.txt",)), tmp_path / "page.html")
    assert "caf?.txt" in (tmp_path / "page.html").read_text(encoding="utf-8")
