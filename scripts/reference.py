"""The commands and options of docs/reference.md, derived from the requests.

`tests/docs/test_reference.py` writes them into the page, and compares the page with them.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args, get_type_hints

import fp8calib.requests
from fp8calib.requests.options import Option

Row = tuple[str, str, str]
"""The spellings, the value and the meaning of an option, as a table shows them."""
_SHARED = "Options of several commands"
_COLUMNS = ("option", "value", "meaning")


def list_requests() -> dict[str, type]:
    """List the requests by the names of their commands, which their examples show."""
    modules = (
        import_module(f"fp8calib.requests.{found.name}")
        for found in iter_modules(fp8calib.requests.__path__)
    )
    requests = (
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value)
        if value.__module__ == module.__name__ and value is not Option
    )
    return dict(sorted((_read_example(each).split()[1], each) for each in requests))


def list_options(request: type) -> list[Row]:
    """List the options of a request in their order, positional arguments first."""
    hints = get_type_hints(request, include_extras=True)
    pairs = [(field, get_args(hints[field.name])[1]) for field in fields(request)]
    return [_describe(*pair) for pair in sorted(pairs, key=lambda pair: bool(pair[1].flags))]


def make_commands(requests: Mapping[str, type]) -> str:
    """Make a section for each command, and one for the options that several commands have."""
    options = {name: list_options(request) for name, request in requests.items()}
    counts = Counter(row for rows in options.values() for row in rows if row[0].startswith("`--"))
    shared = sorted(row for row, count in counts.items() if count > 1)
    lines: list[str] = []
    for name, request in requests.items():
        lines += [f"### {name}", "", *_read_paragraphs(request), ""]
        lines += _make_table([row for row in options[name] if row not in shared])
        also = ", ".join(row[0] for row in options[name] if row in shared)
        lines += ["", f"Also {also} ([shared](#{_slug()})).", ""] if also else [""]
    return "\n".join([*lines, f"### {_SHARED}", "", *_make_table(shared)]) + "\n"


def _describe(field: Field[Any], option: Option) -> Row:
    """Describe an option; a default that its help names is not repeated."""
    # A pipe separates the columns of a table, and the choices of an option.
    values = (option.metavar or "").split("|")
    meaning = re.sub(r"([|[])", r"\\\1", option.help).replace("<", "&lt;")  # no markup
    if not option.flags:
        return f"`{' or '.join(values)}`", "", meaning
    if field.default is MISSING and field.default_factory is MISSING:
        meaning = f"Required. {meaning}"
    elif "default" not in option.help.lower() and field.default not in (None, False, MISSING):
        meaning = f"{meaning} Default: `{field.default}`."
    spellings = ", ".join(f"`{flag}`" for flag in option.flags.replace("/--", " --").split())
    return spellings, _show_values(values, option), meaning


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
