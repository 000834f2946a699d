"""Targets of config groups that match linears in the names of every engine."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from fp8calib.model.module_paths import split_expert

_ANY = r"\d+"
_EVERY = ".*"
_MOST_NUMBERS = 100
"""The most layer numbers in one expression; `check` evaluates at most 1000 characters."""


def make_targets(modules: Collection[str], others: Collection[str]) -> list[str]:
    """Make targets that match all of `modules` and none of `others`, the other quantized linears.

    Expressions match the ends of paths, because engines use other prefixes. All experts of a layer
    are either in `modules` or in `others`. They match by the path before their projections: SGLang
    0.5.23 looks for `gate_proj` whatever the projections are called (`get_moe_scheme`). No
    expression has a quantifier after a bracket, because `check` does not evaluate those.
    """
    rivals = {".".join("0" if part == _ANY else part for part in _split(each)) for each in others}
    by_shape: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for parts in dict.fromkeys(map(_split, modules)):
        by_shape[tuple(_ANY if part.isdecimal() else part for part in parts)].append(parts)
    ends: dict[str, list[str]] = defaultdict(list)
    exact: list[str] = []
    for shape, paths in by_shape.items():
        found = _find_ends(shape, paths, rivals)
        if not found:
            exact += (".".join(parts) for parts in paths)
        for end in found:
            ends["[.]".join(end[:-1])].append(end[-1])
    return [*(_make_expression(parent, lasts) for parent, lasts in ends.items()), *exact]


def _split(module: str) -> tuple[str, ...]:
    """Split a path into its parts; for an expert, the last two match any number and projection."""
    expert = split_expert(module)
    return (*expert[0].split("."), _ANY, _EVERY) if expert else tuple(module.split("."))


def _find_ends(
    shape: tuple[str, ...], paths: list[tuple[str, ...]], rivals: Collection[str]
) -> list[tuple[str, ...]]:
    """Find the shortest ends that match these paths and no rival, as expressions for each part.

    `shape` has the parts that all paths have, with an expression for every number.
    """
    number = shape.index(_ANY) if _ANY in shape else None
    for start in range(max((number or 0) - 1, 0), -1, -1):
        ends = [[_escape(shape[start:])]]
        if number is not None:
            ends.append(list(_name_numbers(paths, start, number)))
        for each in ends:
            expressions = [_make_expression("[.]".join(end[:-1]), [end[-1]]) for end in each]
            matches = [re.compile(text.removeprefix("re:")).match for text in expressions]
            if not any(match(rival) for rival in rivals for match in matches):
                return each
    return []


def _name_numbers(
    paths: list[tuple[str, ...]], start: int, place: int
) -> Iterator[tuple[str, ...]]:
    """Make ends that list the numbers at one place, for paths that differ there alone."""
    numbers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for parts in paths:
        numbers[(*parts[start:place], "", *parts[place + 1 :])].append(parts[place])
    for parts, found in numbers.items():
        for first in range(0, len(found), _MOST_NUMBERS):
            some = _escape(found[first : first + _MOST_NUMBERS])
            listed = some[0] if len(some) == 1 else f"({'|'.join(some)})"
            before, after = parts[: place - start], parts[place - start + 1 :]
            yield (*_escape(before), listed, *_escape(after))


def _escape(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part if part in (_ANY, _EVERY) else re.escape(part) for part in parts)


def _make_expression(parent: str, lasts: Sequence[str]) -> str:
    last = lasts[0] if len(lasts) == 1 else f"({'|'.join(lasts)})"
    return f"re:(.*[.]|){parent}{'[.]' if parent else ''}{last}$"
