"""The page in a real browser, wide and narrow, light and dark: drawn whole, and readable."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from fp8calib.verification.page.page import write_page
from fp8calib.verification.report import Decision
from tests.kit.minutes import in_minutes
from tests.kit.reports import make_candidate, make_layer, make_small
from tests.verification.sample_report import make_report
from tests.verification.test_page import HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--allow-file-access-from-files",
    "--hide-scrollbars",
)
DESKTOP, PHONE = (1400, 900), (390, 844)
LIGHT, DARK = 1, 0

MEASURE = """
const page = frame.contentDocument, inside = frame.contentWindow;
const all = (css) => [...page.querySelectorAll(css)];
const box = (element) => element.getBoundingClientRect();
const style = (element) => inside.getComputedStyle(element);
const texts = all('svg').map((chart) => [...chart.querySelectorAll('text')].map(box));
const apart = (a, b) => a.left >= b.right - 1 || b.left >= a.right - 1 ||
  a.top >= b.bottom - 2 || b.top >= a.bottom - 2;
const luminance = (color) => {
  const parts = color.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255)
    .map((share) => share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = (element) => {
  const color = style(element).backgroundColor;
  return color === 'rgba(0, 0, 0, 0)' ? ground(element.parentElement) : color;
};
const contrast = (element) => {
  const pair = [luminance(style(element).color), luminance(ground(element))];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
};
const fold = page.querySelector('.scroll');
const first = fold ? box(fold).bottom < inside.innerHeight : false;
for (const part of all('details')) part.open = true;
return {
  first,
  ground: style(page.body).backgroundColor,
  width: page.documentElement.scrollWidth,
  scrolls: fold.scrollWidth > fold.clientWidth,
  title: page.querySelector('h1').lastChild.textContent,
  scripts: page.scripts.length,
  charts: all('figure').length,
  empty: all('figure').filter((figure) => box(figure.querySelector('svg')).width < 250 ||
    !figure.querySelector('.marks, .bar')).map((figure) => figure.textContent),
  outside: all('svg text').filter((text) => box(text).left < box(text.closest('svg')).left - 6 ||
    box(text).right > box(text.closest('svg')).right + 6).map((text) => text.textContent),
  wide: all('body *').filter((element) => !element.closest('.scroll, svg') &&
    box(element).right > inside.innerWidth + 1).map((element) => element.outerHTML.slice(0, 80)),
  overlapping: texts.flatMap((boxes) => boxes.filter((one, index) =>
    boxes.slice(index + 1).some((other) => !apart(one, other)))).length,
  smallest: Math.min(...all('svg text').map((text) =>
    parseFloat(style(text).fontSize) * text.getScreenCTM().a)),
  pale: all('h1, h2, p, td, th, summary, code, li, .badge, .glyph').filter((element) =>
    contrast(element) < (element.closest('.glyph') ? 3 : 4.5) && !/h[0-4]/.test(element.className)
  ).map((element) => element.outerHTML.slice(0, 80)),
};
"""
"""WCAG 2 asks for a contrast of 4.5 for text, and of 3 for marks."""


def look(page: Path, size: tuple[int, int], scheme: int = LIGHT) -> dict[str, Any]:
    """Lay a page out in a frame of this size, and measure what is drawn."""
    harness = page.with_name("harness.html")
    harness.write_text(
        f"<iframe src='{page.name}' style='border: 0; width: {size[0]}px; height: {size[1]}px'>"
        "</iframe><pre></pre><script>const frame = document.querySelector('iframe');"
        f"const measure = () => {{{MEASURE}}}; frame.onload = () => {{"
        "document.querySelector('pre').textContent = encodeURIComponent(JSON.stringify(measure()));"
        "};</script>"
    )
    own = (
        f"--user-data-dir={page.parent / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    command = [str(CHROMIUM), *FLAGS, *own, "--dump-dom", harness.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (measured,) = re.findall("<pre>(.*?)</pre>", done.stdout)
    found: dict[str, Any] = json.loads(unquote(measured))
    return found


@pytest.mark.parametrize("size", [DESKTOP, PHONE, *in_minutes((1200, 900), (420, 900))])
def test_everything_is_drawn_and_can_be_read(tmp_path: Path, size: tuple[int, int]) -> None:
    scheme = DARK if size == DESKTOP else LIGHT
    write_page(make_report(), tmp_path / "page.html", command="vllm serve out")
    found = look(tmp_path / "page.html", size, scheme)
    assert found["first"], "answer, command and candidates are on the first screen"
    assert found["charts"] == 2 + 1 + 2  # KLD, SQNR of keys, histograms
    assert found["empty"] == found["outside"] == found["wide"] == found["pale"] == []
    assert found["overlapping"] == 0
    assert found["smallest"] > 10
    assert found["width"] == size[0]
    assert found["scrolls"] is (size[0] < 500)
    assert found["ground"] == ("rgb(18, 23, 28)" if scheme == DARK else "rgb(245, 247, 249)")


def test_hostile_names_run_nothing_and_widen_nothing(tmp_path: Path) -> None:
    names = (HOSTILE, "x" * 300)
    report = make_small(
        model=HOSTILE,
        decision=Decision(headline=HOSTILE * 3),
        warnings=names,
        data=names,
        candidates=tuple(make_candidate(name, verdict_why=HOSTILE) for name in names),
        layers=tuple(make_layer(name, 0) for name in names),
    )
    write_page(report, tmp_path / "page.html")
    found = look(tmp_path / "page.html", PHONE)
    assert (found["scripts"], found["title"], found["width"]) == (0, HOSTILE, PHONE[0])
