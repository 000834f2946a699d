"""The page as a file: what its HTML holds, what it escapes, that it asks nothing of any network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.page.page import render_page, write_page
from fp8calib.verification.report import (
    SCALE_ONE,
    Decision,
    RunProvenance,
    Verdict,
    VerifyReport,
    WorstText,
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
    run = "vLLM 9.8.7, emulated \u00b7 4,095 tokens in 3 sequences (one.jsonl, two.txt)"
    assert any(word.startswith(run) for word in words)


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


def test_the_page_ends_with_what_it_was_made_from() -> None:
    provenance = RunProvenance(
        date="2026-01-02T03:04:05+00:00",
        command="fp8calib verify the/model",
        model_hash="ab" * 32,
        data_hash="cd" * 32,
        versions={"fp8calib": "9.9", "torch": "2.x"},
    )
    words = read(make_small(provenance=provenance)).words
    assert words[words.index("Provenance") + 1 :][:12] == [
        "Versions",
        "fp8calib 9.9, torch 2.x",
        "Date",
        "2026-01-02T03:04:05+00:00",
        "Command",
        "fp8calib verify the/model",
        "Run",
        "62 s on cpu",
        "Hash of the model",
        "ab" * 32,
        "Hash of the text",
        "cd" * 32,
    ]


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


def test_the_texts_that_lose_most_are_quoted() -> None:
    text = WorstText(
        candidate="a", sequence=3, kld=0.5, before="... as", worst="typed", worst_kld=7.25
    )
    words = read(make_small(worst_texts=(text,))).words
    first = words.index("Texts that lose most with a")
    assert words[first + 6 : first + 11] == ["3", "0.5000", "typed", "7.2500", "... as"]


@pytest.mark.parametrize(
    ("report", "gate", "headings"),
    [
        (
            make_report(),
            "kv",
            [
                "Warnings",
                "The kv gate",
                "KLD by sequence and by position",
                "Texts that lose most with SmolLM2-135M-fp8calib/kv-overlay",
                "SQNR by layer",
                "Tensors that lose most",
                "Scale rules",
                "Provenance",
            ],
        ),
        (
            make_small(),
            "",
            [
                "KLD by sequence and by position",
                "Provenance",
            ],
        ),
        (
            make_small(layers=(make_layer("out/overlay", 0),)),
            "",
            [
                "KLD by sequence and by position",
                "SQNR by layer",
                "Tensors of lowest SQNR",
                "Provenance",
            ],
        ),
    ],
)
def test_a_page_has_the_parts_that_its_report_has(
    report: VerifyReport, gate: str, headings: list[str]
) -> None:
    page = Reader(render_page(report, gate=GATES.get(gate)))
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


def test_names_are_text_wherever_they_stand() -> None:
    hostile = make_small(
        model=HOSTILE,
        decision=Decision(headline=HOSTILE),
        data=(HOSTILE,),
        warnings=(HOSTILE,),
        candidates=(make_candidate(HOSTILE, verdict_why=HOSTILE, description=HOSTILE),),
        layers=(make_layer(HOSTILE, 0, sqnr_db=9.0, clipped=0.5),),
        worst_texts=(
            WorstText(
                candidate="a", sequence=1, kld=0.5, before=HOSTILE, worst=HOSTILE, worst_kld=1.0
            ),
        ),
    )
    reader = Reader(render_page(hostile, gate=GATES["kv"]))
    tags = [tag for tag, _ in reader.elements]
    assert (tags.count("script"), tags.count("img")) == (0, 0)
    assert reader.words.count(HOSTILE) == 10


# --- writing it --------------------------------------------------------------------------------


def test_the_names_of_files_that_are_no_utf_8_do_not_stop_it(tmp_path: Path) -> None:
    write_page(make_small(data=("caf\udce9.txt",)), tmp_path / "page.html")
    assert "caf?.txt" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_scale_one_is_no_choice_beside_fp8_weights_alone() -> None:
    rows = [make_layer("out/overlay", 0, role) for role in ("weight", "input")]
    rows.append(make_layer(SCALE_ONE, 0))
    page = render_page(make_small(layers=tuple(rows)))
    assert "out/overlay" in page
    assert SCALE_ONE not in page
    assert SCALE_ONE in render_page(make_small(layers=(make_layer("out/overlay", 0), rows[-1])))
