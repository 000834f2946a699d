"""The commands and options of docs/reference.md, derived from the requests.

`tests/docs/test_reference.py` writes them into the page, and compares the page with them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fp8calib.commands import find_request, spell_commands
from fp8calib.commands.request import REQUIRED, Option, list_options

Row = tuple[str, str, str]
"""The spellings, the value and the meaning of an option, as a table shows them."""
_SHARED = "Options of several commands"
_COLUMNS = ("option", "value", "meaning")


def list_requests() -> dict[str, type]:
    """List the requests by the names of their commands."""
    return {typed: find_request(name) for typed, name in spell_commands().items()}


def list_rows(request: type) -> list[Row]:
    """List the options of a request in their order, positional arguments first."""
    options = [each for each in list_options(request) if each.spelling]
    rows = [_describe(each) for each in options]
    return sorted(rows, key=lambda row: row[0].startswith("`--"))


def make_commands(requests: Mapping[str, type]) -> str:
    """Make a section for each command, and one for the options that several commands have."""
    options = {name: list_rows(request) for name, request in requests.items()}
    counts = Counter(row for rows in options.values() for row in rows if row[0].startswith("`--"))
    shared = sorted(row for row, count in counts.items() if count > 1)
    lines: list[str] = []
    for name, request in requests.items():
        lines += [f"### {name}", "", *_read_paragraphs(request), ""]
        lines += _make_table([row for row in options[name] if row not in shared])
        also = ", ".join(row[0] for row in options[name] if row in shared)
        lines += ["", f"Also {also} ([shared](#{_slug()})).", ""] if also else [""]
    return "\n".join([*lines, f"### {_SHARED}", "", *_make_table(shared)]) + "\n"


def _describe(option: Option) -> Row:
    """Describe an option; a default that its help names is not repeated."""
    # A pipe separates the columns of a table, and the choices of an option.
    values = option.value.split("|")
    meaning = option.help.replace("|", r"\|").replace("<", "&lt;")
    if not option.flags:
        return f"`{' or '.join(values)}`", "", meaning
    if option.default is REQUIRED:
        meaning = f"Required. {meaning}"
    elif "default" not in option.help.lower() and _is_shown(option):
        meaning = f"{meaning} Default: `{option.default}`."
    spellings = ", ".join(f"`{flag}`" for flag in option.flags)
    return spellings, _show_values(values, option), meaning


def _is_shown(option: Option) -> bool:
    """Whether the default is a value, rather than that of an option that is not given."""
    return isinstance(option.default, str | int | float) and not isinstance(option.default, bool)


def _show_values(values: Sequence[str], option: Option) -> str:
    shown = ", ".join(f"`{value}`" for value in values if value)
    if option.most is not None:
        return f"{shown}, {option.least} to {option.most}"
    return shown if option.least is None else f"{shown}, at least {option.least:g}"


def _read_paragraphs(request: type) -> Iterator[str]:
    """Read what the docstring says, which is the text of `--help`; the example becomes code."""
    yield (inspect.getdoc(request) or "").partition("\nExample: ")[0].strip()
    yield ""
    yield f"Example: `{_read_example(request)}`"


def _read_example(request: type) -> str:
    return (inspect.getdoc(request) or "").partition("Example: ")[2].strip()


def _make_table(rows: Sequence[Row]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (_COLUMNS, ("---", "---", "---"), *rows)]


def _slug() -> str:
    return _SHARED.lower().replace(" ", "-")
