"""A hint that names an option or a command is followed to the letter, and leads to an answer.

`hints_followed.txt` has a block for each: a command, the hint that it prints as its error (>) or
beside an answer (~), and what a reader puts in, as `--option = value` or `WORD = value`. Nothing
after = leaves an alternative out. `{name}` is a place of `places.MAKERS`, `{out}` and `{new}` are
free. `hints_not_run.txt` has the others, under the reason why they are not followed.
"""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.places import Places
from tests.cli.program import run
from tests.cli.test_remote_code import carried
from tests.kit.hints import MODULES, PACKAGE, follow, list_hints, read_hint

JUDGED = (8, 9)
"""The exit codes of a judgement: what is wrong, or cannot be told."""
_SIZE = re.compile(r"(?<=--memory )[\d.]+")
"""That of a process, which no two machines agree on."""


@dataclass(frozen=True)
class Block:
    """A block of the table."""

    command: str
    hint: str
    is_refused: bool
    fill: Mapping[str, str]


def read_blocks() -> Iterator[Block]:
    text = Path(__file__).with_name("hints_followed.txt").read_text()
    for block in text.strip().split("\n\n"):
        command, hint, *filled = block.splitlines()
        fill = dict(re.split(" = ?", line, maxsplit=1) for line in filled)
        yield Block(command, hint[2:], is_refused=hint.startswith("> "), fill=fill)


BLOCKS = list(read_blocks())


def clear(places: Places) -> None:
    """Remove what a command wrote: the next one is another answer to the same hint."""
    for name in ("out", "new"):
        shutil.rmtree(places[name], ignore_errors=True)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.command)
def test_a_hint_leads_to_an_answer(block: Block, places: Places, request: Any) -> None:
    if "{carried}" in block.command:
        places = places.beside({"carried": request.getfixturevalue(carried.__name__)})
    words = places.fill(block.command).split()
    hint = places.fill(block.hint)
    if block.is_refused:
        outcome = run(*words, "--json")
        printed = outcome.json["error"]["hint"]
        assert _SIZE.sub("", printed) == _SIZE.sub("", hint)
        hint = printed
    else:
        outcome = run(*words)
        assert hint in outcome.out + outcome.err
        clear(places)
    fill = {"MODEL": "{model}", "DIR": "{new}", **block.fill}
    fill = {name: places.fill(text) for name, text in fill.items() if text}
    left_out = block.fill.keys() - fill.keys()
    alternatives = [
        steps for steps in read_hint(hint) if left_out.isdisjoint(step.text for step in steps)
    ]
    assert alternatives
    for steps in alternatives:
        for followed in follow(words, steps, fill):
            answer = run(*followed)
            assert answer.code in {0, *JUDGED}, f"{shlex.join(followed)}: {answer.err}"
            assert "error: " not in answer.err or answer.code in JUDGED
        clear(places)


def test_every_hint_is_followed_or_cannot_be() -> None:
    lines = Path(__file__).with_name("hints_not_run.txt").read_text().splitlines()
    known = [line for line in lines if line and not line.startswith("# ")]
    shown = [block.hint for block in BLOCKS]
    met, open_ones = set(), []
    for path in MODULES:
        folder = str(path.relative_to(PACKAGE))
        for text in list_hints(path):
            listed = [each for each in known if each in text or folder.startswith(each)]
            met |= {*listed}
            parts = re.split(r"{\w*}", text.strip())
            found = re.compile(".*?".join(map(re.escape, parts)))
            if not listed and not any(map(found.search, shown)):
                open_ones.append(f"{folder}: {text}")
    assert open_ones == []
    assert met == {*known}
