"""Read the pages of the documentation, and the commands in them."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "scripts" / "benchmarks" / "README.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), BENCHMARKS]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MATRIX = re.compile(r"\$\{\{ matrix\.(\w+) \}\}")


@dataclass(frozen=True)
class Command:
    """One command line of a page."""

    page: str
    words: tuple[str, ...]
    output: str | None
    """The file that stdout goes to."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def list_commands(page: Path) -> Iterator[Command]:
    """List the commands of a page's `sh` blocks, and of the workflows in its `yaml` blocks."""
    for language, text in _FENCE.findall(page.read_text()):
        if language == "sh":
            yield from _parse_lines(page, text)
        elif language == "yaml" and "jobs" in (workflow := yaml.safe_load(text)):
            yield from _parse_workflow(page, workflow)


def list_outputs(page: Path) -> Iterator[tuple[str, list[str]]]:
    """List the commands in `text` blocks of a page, which stand after `$`, with their output.

    Two spaces continue a line.
    """
    blocks = (text for language, text in _FENCE.findall(page.read_text()) if language == "text")
    whole = re.sub(r"\n  (?=\S)", " ", "".join(blocks))
    for section in re.split(r"^\$ ", whole, flags=re.MULTILINE)[1:]:
        command, *lines = section.splitlines()
        yield command, lines


def compare_generated(path: Path, text: str, *, maker: str, name: str = "") -> None:
    """Compare a file, or the part of a page between its markers, with what the program says.

    FP8CALIB_WRITE_README=1 in the environment writes it instead.
    """
    before = after = ""
    shown = path.read_text() if path.exists() else ""
    if name:
        before, marker, rest = shown.partition(f"<!-- {name}: made by {maker} -->\n")
        assert marker, f"{path.name} has no marker for {name}"
        _, end, after = rest.partition("<!-- end -->")
        before, after = before + marker, end + after
    if os.environ.get("FP8CALIB_WRITE_README"):
        path.write_text(before + text + after)
    else:
        assert shown == before + text + after, f"FP8CALIB_WRITE_README=1 {maker} writes it again"


def make_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table of a page."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _parse_lines(page: Path, text: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            output = words[-1] if ">" in words else None
            yield Command(page.name, tuple(words[: words.index(">")] if output else words), output)


def _parse_workflow(page: Path, workflow: dict[str, Any]) -> Iterator[Command]:
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {"": [""]})
        ((name, values),) = matrix.items()
        for value in values:
            for step in job["steps"]:
                if "run" in step:
                    assert set(_MATRIX.findall(step["run"])) <= {name}
                    yield from _parse_lines(page, _MATRIX.sub(str(value), step["run"]))
