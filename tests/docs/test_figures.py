"""The figures of README.md and docs/results.md: what their own commands print.

Figures and their errors are read from the page. A figure may be three standard errors of the
difference away, because another version of Python brings another text.
"""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts import demonstrate
from tests.docs.pages import DOCS, ROOT, list_outputs
from tests.kit.minutes import takes_minutes

README = ROOT / "README.md"
RESULTS = DOCS / "results.md"
MODEL = Path("demo") / "SmolLM2-135M-Instruct"
FIGURE = r"([+-]?\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)"
OTHER = r"\d+\.\d s \(\d+ tokens/s\)|\d+\.\d+\.\d+|\.\.\."
"""Durations, versions of engines, and what a page leaves out."""
LOOSE = re.compile(rf"(?P<figure>{FIGURE})|{OTHER}")

pytestmark = pytest.mark.skipif(
    not (ROOT / MODEL).is_dir(), reason="no demo model: scripts/fetch-demo-model"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty folder with the demo model."""
    (tmp_path / MODEL.parent).mkdir()
    (tmp_path / MODEL).symlink_to((ROOT / MODEL).resolve())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loosen(shown: str) -> str:
    """Make a pattern of what a page shows, with two groups for a figure and its error."""
    pattern, end = "", 0
    for match in LOOSE.finditer(shown):
        pattern += re.escape(shown[end : match.start()]) + (FIGURE if match["figure"] else ".*")
        end = match.end()
    return pattern + re.escape(shown[end:])


def agree(shown: str, found: re.Match[str]) -> bool:
    """Whether every figure is the one of the page, within three standard errors."""
    mine = [tuple(map(float, found.groups()[i : i + 2])) for i in range(0, len(found.groups()), 2)]
    told = [tuple(map(float, pair)) for pair in re.findall(FIGURE, shown)]
    pairs = zip(told, mine, strict=True)
    return all(abs(a - b) <= 3 * math.hypot(a_se, b_se) for (a, a_se), (b, b_se) in pairs)


def check_shown(shown: str, printed: str, *, before: str = "", after: str = "") -> None:
    """Require that one place of what was printed is what a page shows."""
    found = list(re.finditer(before + loosen(shown) + after, printed, re.MULTILINE))
    assert found, f"not printed: {shown}\n{printed}"
    assert any(agree(shown, each) for each in found), f"{shown}\n{found[0][0]}"


def check_output(lines: Iterable[str], printed: str) -> None:
    for line in lines:
        check_shown(line, printed, before="^", after="$")


def test_the_readme_shows_commands_of_the_demo_in_their_order(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(demonstrate, "run_program", lambda words: asked.append(shlex.join(words)))
    (place / demonstrate.OUT).mkdir(parents=True)
    demonstrate.main()
    shown = [command.removeprefix("fp8calib ") for command, _ in list_outputs(README)]
    assert [each for each in asked if each in shown] == shown


@takes_minutes
def test_the_demo_prints_what_the_readme_shows(place: Path) -> None:
    command = [sys.executable, "-m", "scripts.demonstrate"]
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, cwd=place, env=path, capture_output=True, text=True, check=True
    ).stdout
    for asked, lines in list_outputs(README):
        check_output(lines, printed.partition(f"$ {asked}\n")[2].partition("\n$ ")[0])


def test_the_readme_has_no_figure_that_is_not_checked() -> None:
    """Beside those of its commands there is the table of schemes, which is that of the results."""
    text = README.read_text(encoding="utf-8")
    outputs = " ".join(line for _, lines in list_outputs(README) for line in lines)
    checked = re.findall(FIGURE, outputs + "".join(re.findall(r"^\| `.*$", text, re.MULTILINE)))
    assert len(checked) > 6
    assert len(re.findall(FIGURE, " ".join(text.split()))) == len(checked)


def read_rows(title: str) -> dict[str, list[str]]:
    """Read the table of the results whose first line begins so: the cells after each scheme."""
    (table,) = re.findall(rf"^\| {re.escape(title)}.*\n((?:\|.*\n)+)", RESULTS.read_text(), re.M)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    return {scheme.strip("`"): cells for scheme, *cells in rows}


@takes_minutes
def test_schemes_cost_what_the_results_say() -> None:
    module = ("-m", "scripts.benchmarks.quality", "--model", str(MODEL), "--peers-python", "none")
    printed = subprocess.run(
        [sys.executable, *module], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rows = read_rows("scheme | size")
    assert len(rows) == 4
    for scheme, cells in rows.items():
        check_shown(f"| {scheme} | {' | '.join(cells)} |", printed)
