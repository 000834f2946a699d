"""The source files of SGLang: of the newest release, or of that which a process is started for."""

import ast
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from fp8calib.engines.facts.release import SGLANG_RELEASES
from tests.real_engines.package import Package, open_package

MODELS = "sglang/srt/models/"
REQUIREMENT = "FP8CALIB_SGLANG"
"""The variable that names another release, such as `sglang==0.5.20`."""


def open_sglang() -> Package:
    """Open the sources."""
    return open_package(os.environ.get(REQUIREMENT, f"sglang=={SGLANG_RELEASES[-1].version}"))


def read_models() -> Mapping[str, ast.Module]:
    """Parse the modules of all models, by their dotted names."""
    return parse_models(open_sglang())


@cache
def parse_models(package: Package) -> Mapping[str, ast.Module]:
    """Parse the modules of all models of a release, by their dotted names."""
    names = (n for n in package.files if n.startswith(MODELS) and n.endswith(".py"))
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): package.parse(name)
        for name in names
    }


def list_entries(package: Package | None = None) -> set[str]:
    """List the classes that an architecture of a config may name."""
    return {
        item.id
        for tree in parse_models(package or open_sglang()).values()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
        for item in ast.walk(node.value)
        if isinstance(item, ast.Name)
    }


MODULE = "sglang/srt/model_loader/weight_utils.py"
WANTED = {"KVCacheQuantSchema", "QuantParamSchema", "kv_cache_scales_loader"}

Loader = Callable[[str, int, int, int, str], Iterable[tuple[int, float]]]
"""Of a file, a rank, the number of ranks, of layers, and the class attribute `model_type`."""


def extract_loader() -> Loader:
    """Run the loader's definition and its schemas, and nothing else, of SGLang's module."""
    tree = open_sglang().parse(MODULE)
    kept = [node for node in tree.body if getattr(node, "name", "") in WANTED or _is_kept(node)]
    assert {getattr(node, "name", "") for node in kept} >= WANTED
    module = types.ModuleType("sglang_scales")
    sys.modules[module.__name__] = module  # where pydantic looks annotations up
    vars(module).update(json=json, logger=logging.getLogger("sglang"))
    exec(compile(ast.Module(kept, []), MODULE, "exec"), vars(module))  # noqa: S102
    return module.kv_cache_scales_loader


def _is_kept(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module in {"pydantic", "typing"}


def list_models_with_scales() -> set[str]:
    """Name the architectures whose class has, or inherits, `load_kv_cache_scales`."""
    bases: dict[str, set[str]] = {}
    having: set[str] = set()
    for node in (node for tree in read_models().values() for node in tree.body):
        if isinstance(node, ast.ClassDef):
            bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if "load_kv_cache_scales" in {getattr(item, "name", "") for item in node.body}:
                having.add(node.name)

    def has_loader(name: str) -> bool:
        return name in having or any(map(has_loader, bases.get(name, ())))

    return {name for name in list_entries() if has_loader(name)}


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
