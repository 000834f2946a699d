"""SGLang's classes of models in a release: read, and their `load_weights` run on names alone.

Whatever a method looks up beside its parameters is a `Stub`. That is enough, for what becomes of a
scale depends on its name and on the names of the parameters.
"""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import torch

from tests.real_engines.class_reader import Class, ClassReader
from tests.real_engines.package import Package, execute
from tests.real_engines.stubs import Names, Stub, answer_imports, take

MODELS = "sglang/srt/models/"
_FOLDERS = (MODELS, "sglang/srt/layers/")
_KV_CACHE = "sglang/srt/layers/quantization/kv_cache.py"
_UTILS = "sglang/srt/model_loader/weight_utils.py"
_PLAIN_VALUES = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set)
_REMAP = "maybe_remap_kv_scale_name"
_METHODS = ("staticmethod", "classmethod")


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
        self.data = Stub()

    def weight_loader(self, *arguments: object, **_: object) -> None:
        """Note what is loaded into the parameter."""
        weights = (item for item in arguments if isinstance(item, torch.Tensor))
        self._loaded[self._name] = next(weights, None)


class SglangModels:
    """The classes of models of a release.

    Args:
        package: the release's.
    """

    def __init__(self, package: Package) -> None:
        self.reader = ClassReader(package, _FOLDERS)
        self._package = package
        self.classes: dict[str, Class] = {}
        """All classes by name."""
        self.entries: dict[str, Class] = {}
        """Those that an architecture of a config may name."""
        self.gives_scales_a_place = cache(self._gives_scales_a_place)
        for module in self.reader.list_modules(MODELS):
            for node in self.reader.open(module).tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = Class(module, node.name)
                elif isinstance(node, ast.Assign) and ast.unparse(node).startswith("EntryClass ="):
                    names = (each for each in ast.walk(node.value) if isinstance(each, ast.Name))
                    found = {each.id: self.reader.resolve(module, each.id) for each in names}
                    self.entries |= {name: each for name, each in found.items() if each}

    def _gives_scales_a_place(self, architecture: str) -> bool:
        """Tell whether all attention layers of a model get the quantization config.

        A model without attention has nothing that lacks it.
        """
        start = self.classes[architecture]
        found = self.reader.read(start.module, architecture)
        states = {each.state for each in found if each.kind == "attention"}
        if states:
            return "none" not in states
        # Muse Spark makes a layer before it becomes part of the model.
        modules = {each.module for each in self.reader.list_bases(start)}
        calls = [
            ast.unparse(node)
            for module in modules
            for node in ast.walk(self.reader.open(module).tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "RadixAttention"
        ]
        return all("quant_config" in call for call in calls)

    def reads_scale_file(self, architecture: str) -> bool:
        """Tell whether a class has, or inherits, `load_kv_cache_scales`."""
        return (
            self.reader.find_method(self.classes[architecture], "load_kv_cache_scales") is not None
        )

    def load(
        self,
        architecture: str,
        tensors: Mapping[str, torch.Tensor],
        parameters: Iterable[str],
        *,
        text: str = "",
    ) -> dict[str, torch.Tensor | None]:
        """Give the tensor that is loaded into each parameter; None for a slice of one.

        `text` names the class of the `language_model` that a model with other inputs wraps.

        Raises:
            KeyError: as the model's loader does; AssertionError as well.
        """
        loaded: dict[str, torch.Tensor | None] = {}
        held = {name: _Parameter(name, loaded) for name in parameters}
        weights = list(tensors.items())
        with answer_imports(lambda name: self._remap if name == _REMAP else Stub()):
            model = self._make_class(architecture, held)()
            if text:
                vars(model)["language_model"] = self._make_class(text, held)()
            result = model.load_weights(weights)
            list(result if isinstance(result, Iterator) else ())
        return loaded

    def _make_class(self, architecture: str, held: Mapping[str, _Parameter]) -> Any:
        """Make a class of methods alone: what else they see is text models, builtins, or stubs."""

        def find(name: str) -> Any:
            is_text = name.endswith("ForCausalLM") and name in self.classes
            return self._make_class(name, held) if is_text else Stub()

        names = Names(
            find,
            torch=torch,
            re=re,
            WeightsMapper=_Mapper,
            maybe_remap_kv_scale_name=self._remap,
            default_weight_loader=lambda parameter, *rest: parameter.weight_loader(*rest),
            get_layer_id=lambda name: int(re.findall(r"layers\.(\d+)\.", name)[0]),
            isinstance=lambda value, kind: type(kind) is type and isinstance(value, kind),
            __builtins__=builtins,
        )
        methods: dict[str, Any] = {"named_parameters": lambda *_, **__: held.items()}
        for module, node in self._list_methods(architecture):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            if "property" in marks or node.name in methods:
                continue
            for item in self.reader.open(module).tree.body:
                if isinstance(item, ast.FunctionDef):
                    item.decorator_list = []
                if _is_plain(item):
                    execute(item, names, module)
            copy = ast.parse(ast.unparse(node)).body[0]
            assert isinstance(copy, ast.FunctionDef)
            copy.decorator_list = [ast.Name(each, ast.Load()) for each in _METHODS if each in marks]
            execute(copy, names, module)
            methods[node.name] = names[node.name]
        return type(architecture, (Stub,), methods)

    def _list_methods(self, architecture: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        """List the methods of a class, then those of its bases, with their modules."""
        known = self.classes.get(architecture)
        for each in self.reader.list_bases(known) if known is not None else ():
            for node in self.reader.open(each.module).classes[each.name].body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                    yield each.module, node

    @cached_property
    def _remap(self) -> Any:
        return take(self._package, _UTILS, _REMAP)

    def hold_kv_scales(self, k: torch.Tensor | None, v: torch.Tensor | None) -> tuple[float, float]:
        """Give the numbers that an attention layer multiplies by, given the tensors loaded into it.

        Raises:
            AssertionError: as SGLang does.
        """
        layer = SimpleNamespace()
        bases = {"QuantizeMethodBase": object}
        method = take(self._package, _KV_CACHE, "BaseKVCacheMethod", **bases)(None)
        method.create_weights(layer)
        load = take(self._package, _UTILS, "default_weight_loader")
        for parameter, tensor in ((layer.k_scale, k), (layer.v_scale, v)):
            if tensor is not None:
                load(parameter, tensor)
        method.process_weights_after_loading(layer)
        return layer.k_scale_float, layer.v_scale_float


def _is_plain(node: ast.stmt) -> bool:
    """Tell whether a statement of a module makes a constant, a function, or the one mapper."""
    if isinstance(node, ast.FunctionDef):
        return True
    value = node.value if isinstance(node, ast.Assign) else None
    if value is not None and ast.unparse(node).startswith("EntryClass"):
        return False
    is_mapper = isinstance(value, ast.Call) and ast.unparse(value.func) == "WeightsMapper"
    return isinstance(value, _PLAIN_VALUES) or is_mapper
