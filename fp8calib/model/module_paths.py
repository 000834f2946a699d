"""Paths of modules: patterns that match them, numbers of experts, and what engines join."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from fp8calib.errors import RecipeError

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_LONGEST = 1000
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
FUSED_PATHS = {
    "q_proj+k_proj+v_proj": "qkv_proj",
    "gate_proj+up_proj": "gate_up_proj",
    "w1+w3": "gate_up_proj",
    "q_a_proj+kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv+in_proj_z": "in_proj_qkvz",
    "in_proj_b+in_proj_a": "in_proj_ba",
    "c_fc_0+c_fc_1": "gate_up_proj",
}
"""Projections of one module that engines load into one weight, and its name in engines (vLLM
0.32.0, SGLang 0.5.23 `models/`)."""
_FUSED_NAMES = {part: parts for parts in FUSED_PATHS for part in parts.split("+")}
"""Projection -> the fused projection that engines load it into."""


def list_paths(module: str) -> Iterator[str]:
    """List the paths of a module and all its parents, outermost first: `a`, `a.b`, `a.b.c`."""
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def matches_pattern(pattern: str, *paths: str) -> bool:
    """Tell whether a glob, or `re:` and an expression, matches the whole of one of `paths`.

    Raises:
        ValueError: `re:` is not followed by a regular expression.
    """
    if not pattern.startswith("re:"):
        return any(fnmatchcase(path, pattern) for path in paths)
    return matches_expression(pattern.removeprefix("re:"), *paths, is_whole=True)


def match_names(pattern: str, names: Sequence[str], key: str) -> list[str]:
    """Find the names that a pattern of a recipe, under `key`, matches.

    Raises:
        RecipeError: it matches none, or is not a valid regular expression.
    """
    try:
        found, why = [name for name in names if matches_pattern(pattern, name)], "matches nothing"
    except ValueError as error:
        found, why = [], f"is {error}"
    if not found:
        hint = f"it has to match names such as {names[0]}" if names else ""
        raise RecipeError(f"{key}: {pattern!r} {why}", hint=hint)
    return found


def matches_expression(expression: str, *paths: str, is_whole: bool = False) -> bool:
    """Tell whether a regular expression matches the start, or the whole, of one of `paths`.

    One for a start is of a checkpoint.

    Raises:
        ValueError: it is not valid, or of a checkpoint and could take exponential time.
    """
    if not is_whole and (len(expression) > _LONGEST or _REPEATED_GROUP.search(expression)):
        raise ValueError(
            "fp8calib does not evaluate this expression, which could take exponential time"
        )
    match = re.fullmatch if is_whole else re.match
    try:
        return any(match(expression, path) for path in paths)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from error


def split_expert(module: str) -> tuple[str, int, str] | None:
    """Split a path in an expert: the path of all experts, its number, the rest; else None."""
    found = _EXPERT.fullmatch(module)
    return (found[1], int(found[2]), found[3]) if found else None


def span_experts(module: str) -> str:
    """Replace an expert's number by `*`, so that all experts of a layer have the same path."""
    found = split_expert(module)
    return f"{found[0]}.*.{found[2]}" if found else module


def group_by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in numbers, under a name with `*` for these numbers.

    A name that is alone in its group keeps its numbers.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    return {pattern if len(found) > 1 else found[0]: found for pattern, found in groups.items()}


def name_fused_group(module: str) -> str:
    """Name the fused weight into which engines load a linear."""
    parent, _, projection = module.rpartition(".")
    return f"{parent}.{_FUSED_NAMES.get(projection, projection)}"


def name_fused_path(module: str) -> str:
    """Name the engine's module of the fused weight into which it loads a linear."""
    parent, _, fused = name_fused_group(module).rpartition(".")
    return f"{parent}.{FUSED_PATHS.get(fused, fused)}".removeprefix(".")
