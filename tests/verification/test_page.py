"""The page as a file: what its HTML holds, what it escapes, that it asks nothing of any network."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fp8calib.verification.page.page import render_page, write_page
from fp8calib.verification.report import (
    Decision,
    RuleResult,
    RunProvenance,
    Verdict,
    VerifyReport,
)
from tests.kit.reports import make_candidate, make_layer, make_small
from tests.verification.sample_report import make_report

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


def test_the_first_screen_is_the_conclusion_the_command_and_the_candidates() -> None:
    report = make_small(
        decision=Decision(
            headline="Use a, which passes.", details="a: model.layers.3.self_attn.k clips."
        ),
    )
    words = read(report, command="vllm serve a").words
    first = words.index("the/model")
    assert words[first : first + 4] == [
        "the/model",
        "Use a, which passes.",
        "a: model.layers.3.self_attn.k clips.",
        "vllm serve a",
    ]
    run = "vLLM 9.8.7, emulated \u00b7 4,095 tokens in 3 sequences of one.jsonl, two.txt"
    assert any(word.startswith(run) for word in words)


def test_without_a_command_there_is_no_place_for_one() -> None:
    assert "pre" not in {tag for tag, _ in read(make_small()).elements}


def test_the_table_holds_the_figures_that_a_verdict_rests_on() -> None:
    reader = read(make_small())
    first = reader.words.index("Top-1") + 1
    assert reader.words[first : first + 8] == [
        "out/overlay",
        "KV cache",
        "! warn",
        "between 1.01 and 1.05 (kv gate)",
        "0.0671 \u00b1 0.0034",
        "0.8920",
        "1.0123 \u00b1 0.0045",
        "92.87%",
    ]
    others = reader.words.index("Top-1 ties") + 1
    assert reader.words[others : others + 5] == [
        "out/overlay",
        "12.346",
        "0.0213",
        "3.4500",
        "2.50%",
    ]


def test_the_page_ends_with_what_it_was_made_from() -> None:
    provenance = RunProvenance(
        date="2026-01-02T03:04:05+00:00",
        command="fp8calib verify the/model",
        model_hash="ab" * 32,
        data_hash="cd" * 32,
        versions={"fp8calib": "9.9", "torch": "2.x"},
    )
    words = read(make_small(provenance=provenance)).words
    assert words[words.index("Provenance") + 1 :][:8] == [
        "Date",
        "2026-01-02T03:04:05+00:00",
        "Command",
        "fp8calib verify the/model",
        "Hash of the model",
        "ab" * 32,
        "Hash of the text",
        "cd" * 32,
    ]
    assert "fp8calib 9.9, torch 2.x" in words


@pytest.mark.parametrize(
    ("verdict", "badge"),
    [
        (Verdict.PASS, "\u2713 pass"),
        (Verdict.WARN, "! warn"),
        (Verdict.FAIL, "\u2715 fail"),
        (Verdict.NO_DIFFERENCE, "= no difference"),
        (Verdict.CANNOT_TELL, "? cannot tell"),
    ],
)
def test_a_verdict_is_a_word_and_not_a_colour_alone(verdict: Verdict, badge: str) -> None:
    reader = read(make_small(candidates=(make_candidate("a", verdict=verdict),)))
    assert reader.words.count(badge) == 1
    badges = [a["class"] for _, a in reader.elements if "badge" in str(a.get("class"))]
    assert badges == [f"badge {verdict}"]


def test_what_fp64_could_not_hold_is_short() -> None:
    broken = make_candidate("a", ppl=sys.float_info.max, ppl_ratio=sys.float_info.max)
    assert {"1.7977e+308", "1.8e+308"} <= set(read(make_small(candidates=(broken,))).words)


def test_warnings_stand_before_the_plots() -> None:
    words = read(make_small(warnings=("the texts overlap",))).words
    assert words.index("Candidate") < words.index("the texts overlap")
    assert words.index("the texts overlap") < words.index("KL divergence by position")


def test_a_report_with_everything_has_every_part_in_its_order() -> None:
    assert read(make_report()).headings == [
        "Warnings",
        "KL divergence by position",
        "Signal to quantization noise by layer",
        "The worst sites",
        "Scale rules",
        "Magnitudes and the range of the format",
        "Other figures of the candidates",
        "Provenance",
    ]


def test_lines_that_are_not_drawn_are_not_described() -> None:
    """Scales by head are known only where calibration measured each head."""
    whole = make_report()
    alone = [row.model_copy(update={"per_head_db": None}) for row in whole.diagnosis]
    for rows, is_described in ((whole.diagnosis, True), (tuple(alone), False)):
        words = read(whole.model_copy(update={"diagnosis": rows})).words
        assert ("per head" in words) == is_described


def test_a_part_without_data_is_left_out() -> None:
    assert read(make_small()).headings == [
        "KL divergence by position",
        "Other figures of the candidates",
        "Provenance",
    ]


def test_a_report_with_nothing_to_draw_is_a_page_still() -> None:
    reader = read(make_small(candidates=(make_candidate("a", by_position=()),)))
    assert "svg" not in {tag for tag, _ in reader.elements}


def test_a_page_of_a_large_model_stays_under_a_megabyte_and_says_what_is_left_out() -> None:
    candidates = tuple(make_candidate(f"candidate-{index}") for index in range(24))
    layers = tuple(
        make_layer(one.name, layer, role=role, site=f"model.layers.{layer}.self_attn.{role}")
        for one in candidates
        for layer in range(126)
        for role in ("k", "v", "q")
    )
    linears = tuple(
        make_layer(one.name, layer, role="input", site=f"model.layers.{layer}.mlp.{index}.input")
        for one in candidates
        for layer in range(126)
        for index in range(12)
    )
    report = make_small(candidates=candidates, layers=layers + linears)
    page = render_page(report)
    assert len(page.encode()) < 1_000_000
    assert re.search(r"\d+ more charts are left out: a page has at most 1 MB", page)


def test_rules_have_a_table() -> None:
    rule = RuleResult(
        candidate="s.safetensors",
        rule="mse",
        ppl_ratio=1.25,
        ppl_ratio_se=0.5,
        kld_mean=0.125,
        kld_se=0.02,
    )
    words = read(make_small(rules=(rule,))).words
    assert {"mse", "1.2500 \u00b1 0.5000", "0.1250 \u00b1 0.0200"} <= set(words)


# --- what it is made of ------------------------------------------------------------------------


def test_nothing_on_the_page_is_loaded_from_anywhere() -> None:
    reader = read(make_report())
    loads = [(tag, name) for tag, attrs in reader.elements for name in attrs if name in LOADERS]
    assert loads == []
    tags = {tag for tag, _ in reader.elements}
    assert tags & {"link", "img", "iframe", "base", "object", "embed", "script"} == set()
    links = [str(attrs["href"]) for _, attrs in reader.elements if "href" in attrs]
    ids = {attrs["id"] for _, attrs in reader.elements if "id" in attrs}
    assert links
    assert {link.removeprefix("#") for link in links} <= ids
    css = "".join(reader.code["style"])
    assert re.findall(r"url\(|@import|https?:", css) == []
    policies = [a["content"] for _, a in reader.elements if a.get("http-equiv")]
    assert [str(policy).split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_names_are_text_wherever_they_stand() -> None:
    hostile = make_small(
        model=HOSTILE,
        decision=Decision(headline=HOSTILE),
        data=(HOSTILE,),
        warnings=(HOSTILE,),
        candidates=(make_candidate(HOSTILE, verdict_why=HOSTILE, description=HOSTILE),),
        layers=(make_layer(HOSTILE, 0),),
    )
    reader = read(hostile)
    tags = [tag for tag, _ in reader.elements]
    assert (tags.count("script"), tags.count("img")) == (0, 0)
    assert reader.words.count(HOSTILE) == 10


# --- writing it --------------------------------------------------------------------------------


def test_the_same_report_gives_the_same_page() -> None:
    assert render_page(make_report()) == render_page(make_report())


def test_the_names_of_files_that_are_no_utf_8_do_not_stop_it(tmp_path: Path) -> None:
    write_page(make_small(data=("caf\udce9.txt",)), tmp_path / "page.html")
    assert "caf?.txt" in (tmp_path / "page.html").read_text(encoding="utf-8")
