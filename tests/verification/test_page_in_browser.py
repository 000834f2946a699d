"""The page in a real browser, wide and narrow, light and dark: drawn whole, readable, offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.page.page import write_page
from fp8calib.verification.report import Decision
from tests.kit.reports import make_candidate, make_layer, make_small
from tests.verification.chromium import NAMES, Page, find_chromium
from tests.verification.sample_report import make_report
from tests.verification.test_page import HOSTILE

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no Chromium on PATH (looked for {', '.join(NAMES)})"
)
DESKTOP = {"width": 1400, "height": 900, "is_phone": False}
PHONE = {"width": 390, "height": 844, "is_phone": True}

UNFOLD = "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
EMPTY_CHARTS = """[...document.querySelectorAll('figure')].filter((figure) => {
  const box = figure.querySelector('svg').getBoundingClientRect();
  const drawn = figure.querySelectorAll('.marks, .bar, .level').length;
  return !drawn || box.width < 250 || box.height < 40;
}).map((figure) => figure.textContent)"""
OUTSIDE_THEIR_CHART = """[...document.querySelectorAll('svg text')].filter((text) => {
  const box = text.closest('svg').getBoundingClientRect();
  const own = text.getBoundingClientRect();
  return own.left < box.left - 6 || own.right > box.right + 6 || own.bottom > box.bottom + 2;
}).map((text) => text.textContent)"""
WIDER_THAN_WINDOW = """[...document.querySelectorAll('body *')].filter((element) =>
  !element.closest('.scroll, svg') && element.getBoundingClientRect().right > innerWidth + 1
).map((element) => element.outerHTML.slice(0, 80))"""
LOW_CONTRAST = """(() => {
  const light = (color) => {
    const parts = color.match(/[0-9.]+/g).slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color === 'rgba(0, 0, 0, 0)' ? ground(element.parentElement) : color;
  };
  const least = (element) => element.closest('.glyph') ? 3 : 4.5;
  return [...document.querySelectorAll('h1, h2, p, td, th, summary, code, li, .badge, .glyph')]
    .filter((element) => {
      const shades = [light(getComputedStyle(element).color), light(ground(element))];
      const ratio = (Math.max(...shades) + 0.05) / (Math.min(...shades) + 0.05);
      return ratio < least(element) && !/h[0-4]/.test(element.className);
    }).map((element) => element.outerHTML.slice(0, 80));
})()"""
"""Text that WCAG 2 calls unreadable: a contrast under 4.5, and of marks under 3."""
OVERLAPPING = """[...document.querySelectorAll('svg')].flatMap((chart) => {
  const boxes = [...chart.querySelectorAll('text')].map((text) => text.getBoundingClientRect());
  return boxes.flatMap((one, index) => boxes.slice(index + 1).filter((other) =>
    one.left < other.right - 1 && other.left < one.right - 1 &&
    one.top < other.bottom - 2 && other.top < one.bottom - 2));
}).length"""
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('svg text')].map((text) =>
  parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert CHROMIUM is not None
    with Page(CHROMIUM, profile=tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(make_report(), path, command="vllm serve out", gate=GATES["kv"])
    return path


@pytest.fixture(scope="module", params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def opened(
    request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """Open the page once for the tests that only look at it."""
    assert CHROMIUM is not None
    with Page(CHROMIUM, profile=tmp_path_factory.mktemp("profile")) as page:
        page.open(path, **request.param)
        assert page.evaluate("innerWidth") == request.param["width"]
        yield page


def find_problems(browser: Page) -> list[Any]:
    """List what went wrong: errors, refused loads."""
    bad = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
    logged = [e for e in browser.events if e["method"] == "Log.entryAdded"]
    return [*bad, *logged]


def list_requests(browser: Page) -> list[str]:
    """List the addresses the page asked for, those inside it left out."""
    asked = [e for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    urls = [event["params"]["request"]["url"] for event in asked]
    return [url for url in urls if not url.startswith("data:")]


def test_every_chart_is_drawn_and_nothing_goes_wrong(opened: Page) -> None:
    opened.evaluate(UNFOLD)
    assert find_problems(opened) == []
    charts = opened.evaluate("document.querySelectorAll('figure').length")
    assert charts == 8 + 2 + 1 + 2  # the gate's, KLD, SQNR of keys, histograms
    assert opened.evaluate(EMPTY_CHARTS) == []
    assert opened.evaluate(OUTSIDE_THEIR_CHART) == []


@pytest.mark.parametrize("width", [420, 1200])
def test_the_text_of_charts_is_large_enough_and_nothing_overlaps(
    browser: Page, path: Path, width: int
) -> None:
    browser.open(path, width=width, height=900, is_phone=width == 420)
    browser.evaluate(UNFOLD)
    assert browser.evaluate(OVERLAPPING) == 0
    assert browser.evaluate(SMALLEST_TEXT) > 10
    assert browser.evaluate(OUTSIDE_THEIR_CHART) == []


def test_nothing_is_wider_than_the_window(opened: Page) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    assert opened.evaluate(WIDER_THAN_WINDOW) == []


def test_the_first_screen_holds_the_answer_the_command_and_the_candidates(opened: Page) -> None:
    opened.evaluate("scrollTo(0, 0)")
    ends = "document.querySelector('.scroll').getBoundingClientRect().bottom"
    assert opened.evaluate(f"{ends} < innerHeight")
    assert opened.evaluate("document.querySelector('pre').textContent") == "vllm serve out"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(browser: Page, path: Path, scheme: str) -> None:
    browser.prefer(scheme)
    browser.open(path, **DESKTOP)
    browser.evaluate(UNFOLD)
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(245, 247, 249)", "dark": "rgb(18, 23, 28)"}[scheme]
    assert browser.evaluate(LOW_CONTRAST) == []
    browser.prefer("light")


def test_a_table_scrolls_inside_its_own_box_on_a_phone(browser: Page, path: Path) -> None:
    browser.open(path, **PHONE)
    box = "document.querySelector('.scroll')"
    assert browser.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
    assert browser.evaluate(f"({box}.scrollLeft = 200, {box}.scrollLeft)") == 200


def test_hostile_names_run_nothing_and_widen_nothing(browser: Page, tmp_path: Path) -> None:
    names = (HOSTILE, "x" * 300)
    report = make_small(
        model=HOSTILE,
        decision=Decision(headline=HOSTILE * 3),
        warnings=names,
        data=names,
        candidates=tuple(make_candidate(name, verdict_why=HOSTILE) for name in names),
        layers=tuple(make_layer(name, 0) for name in names),
    )
    write_page(report, tmp_path / "hostile.html")
    browser.open(tmp_path / "hostile.html", **PHONE)
    assert find_problems(browser) == []
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("document.querySelector('h1').lastChild.textContent") == HOSTILE
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert list_requests(browser) == [(tmp_path / "hostile.html").as_uri()]
