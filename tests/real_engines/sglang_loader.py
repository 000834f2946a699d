"""SGLang's own reader of scale files, taken out of its wheel: the rest wants a GPU."""

from __future__ import annotations

import ast
import json
import logging
import sys
import types
from collections.abc import Callable, Iterable

from tests.real_engines.sglang_sources import list_entries, open_sglang, read_models

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
