"""The page in a real browser, on a desktop and on a phone: drawn whole, readable, offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8calib.verification.html.page import write_page
from fp8calib.verification.html.sections import make_sections
from tests.verification.chromium import NAMES, Page, find_chromium
from tests.verification.sample_report import make_report
from tests.verification.test_page import HOSTILE, make_candidate, make_layer, make_small

pytest.importorskip("plotly")
CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no Chromium on PATH (looked for {', '.join(NAMES)})"
)
DESKTOP = {"width": 1400, "height": 900, "is_phone": False}
PHONE = {"width": 390, "height": 844, "is_phone": True}

NUM_PLOTS = "document.querySelectorAll('.plots > figure > .js-plotly-plot').length"
EMPTY_PLOTS = """[...document.querySelectorAll('.js-plotly-plot')].filter((plot) => {
  const marks = '.point, .trace path, .heatmaplayer image';
  const box = plot.querySelector('.main-svg').getBoundingClientRect();
  return !plot.querySelector(marks) || box.width < 250 || box.height < 100;
}).map((plot) => plot.id)"""
COVERED = """[...document.querySelectorAll('.js-plotly-plot .legend')].filter((legend) => {
  const area = legend.closest('.js-plotly-plot').querySelector('.nsewdrag').getBoundingClientRect();
  return legend.getBoundingClientRect().bottom > area.top + 1;
}).length"""
WIDER_THAN_WINDOW = """[...document.querySelectorAll('body *')].filter((element) =>
  !element.closest('.scroll, #legend, svg') &&
  element.getBoundingClientRect().right > innerWidth + 1
).map((element) => element.outerHTML.slice(0, 80))"""
SHOWN_LINES = "document.querySelectorAll('#sqnr-k .scatterlayer .trace').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert CHROMIUM is not None
    with Page(CHROMIUM, profile=tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(make_report(), path)
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
    """List what went wrong: errors of scripts, refused loads, what the page itself says."""
    shown = browser.evaluate("document.getElementById('problem').textContent")
    bad = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
    logged = [e for e in browser.events if e["method"] == "Log.entryAdded"]
    return [*([shown] if shown else []), *bad, *logged]


def list_requests(browser: Page) -> list[str]:
    """List the addresses the page asked for, those inside it left out."""
    asked = [e for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    urls = [event["params"]["request"]["url"] for event in asked]
    return [url for url in urls if not url.startswith("data:")]


def test_every_plot_is_drawn_and_nothing_goes_wrong(opened: Page) -> None:
    assert find_problems(opened) == []
    drawn = [plot for section in make_sections(make_report()) for plot in section.plots]
    assert opened.evaluate(NUM_PLOTS) == len(drawn) == 18
    assert opened.evaluate(EMPTY_PLOTS) == []


def test_the_page_asks_for_nothing_but_itself(opened: Page, path: Path) -> None:
    assert list_requests(opened) == [path.as_uri()]


def test_nothing_is_wider_than_the_window(opened: Page) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    assert opened.evaluate(WIDER_THAN_WINDOW) == []


def test_no_legend_lies_on_its_plot(opened: Page) -> None:
    assert opened.evaluate("document.querySelectorAll('.js-plotly-plot .legend').length") == 3
    assert opened.evaluate(COVERED) == 0


def test_a_table_scrolls_inside_its_own_box_on_a_phone(browser: Page, path: Path) -> None:
    browser.open(path, **PHONE)
    box = "document.querySelector('.scroll')"
    assert browser.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
    assert browser.evaluate(f"({box}.scrollLeft = 200, {box}.scrollLeft)") == 200


def test_a_finger_on_a_plot_scrolls_the_page(browser: Page, path: Path) -> None:
    browser.open(path, **PHONE)
    browser.evaluate("document.getElementById('sqnr-k').scrollIntoView({block: 'center'})")
    start = browser.evaluate("scrollY")
    browser.drag_finger(x=200, start=422, end=222)
    browser.wait_for(f"scrollY > {start + 100}")


def test_plots_follow_the_window(browser: Page, path: Path) -> None:
    browser.open(path, **DESKTOP)
    browser.resize(width=600, height=800)
    svg = "document.querySelector('#positions .main-svg')"
    browser.wait_for(f"{svg}.getBoundingClientRect().width < 600")
    assert browser.evaluate("document.documentElement.scrollWidth") == 600


def test_a_click_hides_a_candidate_and_another_shows_it(browser: Page, path: Path) -> None:
    browser.open(path, **DESKTOP)
    assert browser.evaluate(SHOWN_LINES) == 4
    browser.evaluate("document.querySelectorAll('#legend button')[3].click()")
    browser.wait_for(f"{SHOWN_LINES} == 3")
    browser.evaluate("document.querySelectorAll('#legend button')[3].click()")
    browser.wait_for(f"{SHOWN_LINES} == 4")
    assert find_problems(browser) == []


def test_the_buttons_walk_through_the_histograms(browser: Page, path: Path) -> None:
    browser.open(path, **DESKTOP)
    figure = "document.getElementById('histogram').closest('figure')"
    site = f"{figure}.querySelector('select').value"
    border = "document.querySelector('#histogram .annotation-text').textContent"
    first = browser.evaluate(border)
    assert browser.evaluate(site) == "model.layers.0.self_attn.k"
    browser.evaluate(f"{figure}.querySelectorAll('button')[1].click()")
    assert browser.evaluate(site) == "model.layers.1.self_attn.k"
    browser.wait_for(f"{border} != {first!r}")
    browser.evaluate(f"{figure}.querySelectorAll('button')[0].click()")
    browser.evaluate(f"{figure}.querySelectorAll('button')[0].click()")
    assert browser.evaluate(site) == "model.layers.29.self_attn.v"
    assert find_problems(browser) == []


def test_hostile_names_run_nothing_and_widen_nothing(browser: Page, tmp_path: Path) -> None:
    names = (HOSTILE, "x" * 300)
    report = make_small(
        model=HOSTILE,
        advice=HOSTILE * 3,
        warnings=names,
        data=names,
        candidates=tuple(make_candidate(name, verdict_why=HOSTILE) for name in names),
        layers=tuple(make_layer(name, 0) for name in names),
    )
    write_page(report, tmp_path / "hostile.html")
    browser.open(tmp_path / "hostile.html", **PHONE)
    assert find_problems(browser) == []
    assert browser.evaluate("document.scripts.length") == 3
    assert browser.evaluate("document.querySelector('h1').lastChild.textContent") == HOSTILE
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert list_requests(browser) == [(tmp_path / "hostile.html").as_uri()]


def test_a_report_with_nothing_to_draw_opens_too(browser: Page, tmp_path: Path) -> None:
    report = make_small(candidates=(make_candidate("a", by_position=()),))
    write_page(report, tmp_path / "bare.html")
    browser.open(tmp_path / "bare.html", **DESKTOP)
    assert (find_problems(browser), browser.evaluate(NUM_PLOTS)) == ([], 0)


def test_what_cannot_be_drawn_is_said_and_the_rest_is_drawn(browser: Page, tmp_path: Path) -> None:
    write_page(make_report(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    broken = page.replace('id="positions"', 'id="elsewhere"')
    (tmp_path / "broken.html").write_text(broken, encoding="utf-8")
    browser.open(tmp_path / "broken.html", **DESKTOP)
    assert len(find_problems(browser)) == 1
    assert browser.evaluate("document.getElementById('problem').offsetHeight") > 0
    assert browser.evaluate(NUM_PLOTS) == 17
