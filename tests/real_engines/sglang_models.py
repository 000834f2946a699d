"""The `load_weights` of SGLang's models, taken out of its wheel and run on names alone.

Nothing else of SGLang is there: whatever a method looks up beside its parameters is a `Nothing`,
which is false, empty, and gives itself for every call and attribute. That is enough, for what
becomes of a scale depends on its name and on the names of the parameters.
"""

from __future__ import annotations

import ast
import builtins
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.real_engines.sglang_sources import MODELS, open_sglang, read_models

KV_CACHE = "sglang/srt/layers/quantization/kv_cache.py"
UTILS = "sglang/srt/model_loader/weight_utils.py"
_PLAIN_VALUES = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set)


class Nothing:
    """Stands for everything that is not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __setattr__(self, name: str, value: object) -> None:
        return None

    def __call__(self, *_: object, **__: object) -> Any:  # noqa: D102 -- the class says it
        return Nothing()

    def __getitem__(self, _: object) -> Any:
        return Nothing()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    __index__ = __len__
    __add__ = __mul__ = __getitem__
    __lt__ = __gt__ = __le__ = __ge__ = __contains__


class _Globals(dict[str, Any]):
    """What a method sees: text models (one lends its loader), builtins, or nothing."""

    def __init__(self, held: Mapping[str, _Parameter], **names: Any) -> None:
        super().__init__(names)
        self._held = held

    def __missing__(self, name: str) -> Any:
        if name.endswith("ForCausalLM") and name in read_classes():
            return _make_class(name, self._held)
        return getattr(builtins, name, Nothing())


class _Absent(MetaPathFinder, Loader):
    """Answers every import of SGLang, inside a function, with a module of nothing."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("sglang") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _remap() if name == _remap().__name__ else Nothing()
        return module

    def exec_module(self, _: ModuleType) -> None:
        return None


class _Mapper:
    """What `models/qwen3_5.py` maps names with, in its one use."""

    def __init__(self, *, orig_to_new_substr: Mapping[str, str]) -> None:
        self._pairs = orig_to_new_substr

    def apply(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, value in weights:
            old = next((old for old in self._pairs if old in name), "")
            yield (name.replace(old, self._pairs[old], 1) if old else name), value


class _Parameter:
    def __init__(self, name: str, loaded: dict[str, torch.Tensor | None]) -> None:
        self._name = name
        self._loaded = loaded
        self.data = Nothing()

    def weight_loader(self, *arguments: object, **_: object) -> None:
        """Note what is loaded into the parameter."""
        weights = (item for item in arguments if isinstance(item, torch.Tensor))
        self._loaded[self._name] = next(weights, None)


def load(
    architecture: str,
    tensors: Mapping[str, torch.Tensor],
    parameters: Iterable[str],
    *,
    text: str = "",
) -> dict[str, torch.Tensor | None]:
    """Give the tensor that is loaded into each parameter that gets one; None for a slice of one.

    `text` names the class of the `language_model` that a model with other inputs wraps.

    Raises:
        KeyError: as the model's loader does; AssertionError as well.
    """
    loaded: dict[str, torch.Tensor | None] = {}
    held = {name: _Parameter(name, loaded) for name in parameters}
    weights = list(tensors.items())
    finder = _Absent()
    sys.meta_path.insert(0, finder)
    try:
        model = _make_class(architecture, held)()
        if text:
            vars(model)["language_model"] = _make_class(text, held)()
        result = model.load_weights(weights)
        list(result if isinstance(result, Iterator) else ())
    finally:
        sys.meta_path.remove(finder)
    return loaded


def _make_class(architecture: str, held: Mapping[str, _Parameter]) -> Any:
    names = _Globals(
        held,
        torch=torch,
        re=re,
        WeightsMapper=_Mapper,
        maybe_remap_kv_scale_name=_remap(),
        default_weight_loader=lambda parameter, *rest: parameter.weight_loader(*rest),
        get_layer_id=lambda name: int(re.findall(r"layers\.(\d+)\.", name)[0]),
        isinstance=lambda value, kind: type(kind) is type and isinstance(value, kind),
        __builtins__=builtins,
    )
    methods: dict[str, Any] = {"named_parameters": lambda *_, **__: held.items()}
    for name, (node, tree) in _find_methods(architecture).items():
        marks = {ast.unparse(mark) for mark in node.decorator_list}
        if "property" in marks:
            continue
        _run([item for item in tree.body if _is_plain(item)], names)
        kept = marks & {"staticmethod", "classmethod"}
        node.decorator_list = [ast.Name(mark, ast.Load()) for mark in kept]
        _run([ast.parse(f"from __future__ import annotations\n{ast.unparse(node)}")], names)
        methods.setdefault(name, names[name])
    return type(architecture, (Nothing,), methods)


def _find_methods(architecture: str) -> dict[str, tuple[ast.FunctionDef, ast.Module]]:
    """Find a class's methods, and those of its bases that it has not."""
    if architecture not in read_classes():
        return {}
    node, tree = read_classes()[architecture]
    own = {
        item.name: (item, tree)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("__")
    }
    bases = (base.id for base in node.bases if isinstance(base, ast.Name))
    inherited = [_find_methods(base) for base in bases]
    return {
        name: found for methods in reversed([own, *inherited]) for name, found in methods.items()
    }


def _is_plain(node: ast.stmt) -> bool:
    """Tell whether a statement of a module makes a constant, a function, or the one mapper."""
    if isinstance(node, ast.FunctionDef):
        return True
    value = node.value if isinstance(node, ast.Assign) else None
    if value is not None and ast.unparse(node).startswith("EntryClass"):
        return False
    is_mapper = isinstance(value, ast.Call) and ast.unparse(value.func) == "WeightsMapper"
    return isinstance(value, _PLAIN_VALUES) or is_mapper


def _run(nodes: list[Any], names: dict[str, Any]) -> None:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        module = node if isinstance(node, ast.Module) else ast.Module([node], [])
        exec(compile(ast.fix_missing_locations(module), MODELS, "exec"), names)  # noqa: S102


@cache
def read_classes() -> dict[str, tuple[ast.ClassDef, ast.Module]]:
    """Find the classes of all models, and the modules that define them."""
    return {
        node.name: (node, tree)
        for tree in read_models().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


@cache
def _remap() -> Any:
    names: dict[str, Any] = {"Optional": Any, "print_warning_once": logging.getLogger().debug}
    return _extract(UTILS, "maybe_remap_kv_scale_name", names)


def hold_kv_scales(k: torch.Tensor | None, v: torch.Tensor | None) -> tuple[float, float]:
    """Give the numbers that an attention layer multiplies by, given the tensors loaded into it.

    Raises:
        AssertionError: as SGLang does.
    """
    layer = SimpleNamespace()
    method = _extract(
        KV_CACHE,
        "BaseKVCacheMethod",
        {"QuantizeMethodBase": object, "is_fp8_fnuz": lambda: False, "torch": torch},
    )(None)
    method.create_weights(layer)
    for parameter, tensor in ((layer.k_scale, k), (layer.v_scale, v)):
        if tensor is not None:
            _extract(UTILS, "default_weight_loader", {"torch": torch})(parameter, tensor)
    method.process_weights_after_loading(layer)
    return layer.k_scale_float, layer.v_scale_float


def _extract(module: str, name: str, names: dict[str, Any]) -> Any:
    """Run the definition of one function or class of SGLang's wheel, and give it."""
    _run([node for node in _parse(module).body if getattr(node, "name", "") == name], names)
    return names[name]


@cache
def _parse(module: str) -> ast.Module:
    return open_sglang().parse(module)
