"""Whether SGLang creates the attention of its models with the quantization config."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from tests.real_engines.sglang_sources import read_models

Place = tuple[str, str]
"""A module of SGLang's models, and a name in it."""


@cache
def gives_scales_a_place(architecture: str) -> bool:
    """Tell whether the attention of a model gets the quantization config.

    The attention is the nearest class that creates a `RadixAttention`, on the way from the model
    over the names in each class; one of the model's own module comes before others. A model without
    attention has nothing that lacks it.
    """
    start = next(place for place in read_definitions() if place[1] == architecture)
    level, seen = [start], {start}
    found: list[Place] = []
    while level:
        found += [place for place in level if any(_calls(place, "RadixAttention"))]
        named = (target for place in level for target in _list_named(place))
        level = [target for target in dict.fromkeys(named) if target not in seen]
        seen.update(level)
    if not found:
        return True
    nearest = next((place for place in found if place[0] == start[0]), found[0])
    calls = [*_calls(nearest, "RadixAttention")]
    calls += [
        call
        for place in seen
        for name in _spellings(place[0], nearest)
        for call in _calls(place, name)
    ]
    return all(_passes_config(call) for call in calls)


def _list_named(place: Place) -> Iterator[Place]:
    for node in ast.walk(read_definitions()[place]):
        if isinstance(node, ast.Name):
            target = resolve(place[0], node.id)
            if target is not None:
                yield target


def _calls(place: Place, called: str) -> Iterator[ast.Call]:
    for node in ast.walk(read_definitions()[place]):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == called
        ):
            yield node


def _spellings(module: str, target: Place) -> list[str]:
    """List the names that a definition has in a module."""
    names = [name for name in _imports()[module] if resolve(module, name) == target]
    return [*names, target[1]] if target[0] == module else names


def _passes_config(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_spread = any(keyword.arg is None for keyword in call.keywords)
    return is_spread or any("quant_config" in ast.unparse(value) for value in given)


def resolve(module: str, name: str) -> Place | None:
    """Find the definition that a name means in a module, across imports."""
    if (module, name) in read_definitions():
        return module, name
    origin = _imports().get(module, {}).get(name)
    return None if origin is None or origin == (module, name) else resolve(*origin)


@cache
def read_definitions() -> Mapping[Place, ast.AST]:
    """Find classes and functions, and what is assigned to a name, by module and name."""
    found: dict[Place, ast.AST] = {}
    for module, tree in read_models().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[module, node.name] = node
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                found |= {(module, name): node for name in names if name != "EntryClass"}
    return found


@cache
def _imports() -> Mapping[str, Mapping[str, Place]]:
    return {
        module: {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for module, tree in read_models().items()
    }
