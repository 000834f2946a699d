"""Parts of an engine's package, executed without the rest of it."""

import ast
import builtins
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from tests.real_engines.package import Package, execute, find_symbol

Strategy = StrEnum("Strategy", ["TENSOR", "CHANNEL", "GROUP", "BLOCK", "TOKEN", "ATTN_HEAD"])
_KNOWN: Mapping[str, Any] = {
    "Any": Any,
    "cast": typing.cast,
    "is_quantized_kv_cache": lambda dtype: dtype.startswith("fp8"),
    "QuantizationStrategy": Strategy,
    "torch": torch,
}


class Stub:
    """Stands for what is not there: it is false, empty, and gives itself for all that is asked.

    Args:
        name: as it was looked up.
        arguments: the named ones that it was called with.
    """

    def __init__(self, name: str = "", **arguments: Any) -> None:
        vars(self).update(stub_name=name, stub_arguments=arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{vars(self).get('stub_name', '')}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        return None

    def __call__(self, *_: object, **arguments: Any) -> Any:
        """Give a stub that knows the arguments."""
        made = Stub(self.stub_name)
        vars(made).update(stub_arguments=arguments)
        return made

    def __getitem__(self, _: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    __index__ = __len__
    __or__ = __add__ = __mul__ = __getitem__
    __lt__ = __gt__ = __le__ = __ge__ = __contains__


class Names(dict[str, Any]):
    """What executed code looks up by name.

    Args:
        find: gives what is neither among `names` nor built in.
    """

    def __init__(self, find: Callable[[str], Any] = Stub, **names: Any) -> None:
        super().__init__(names)
        self._find = find

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name) if hasattr(builtins, name) else self._find(name)


class _Modules(MetaPathFinder, Loader):
    """Answers imports of engines inside functions."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        is_engine = name.partition(".")[0] in ("vllm", "sglang")
        return ModuleSpec(name, self, is_package=True) if is_engine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = self._find  # type: ignore[method-assign]
        module.__file__ = None  # hypothesis reads that of every module
        return module

    def exec_module(self, _: ModuleType) -> None:
        return None


@contextmanager
def answer_imports(find: Callable[[str], Any]) -> Iterator[None]:
    """Let imports of an engine give what `find` gives for the imported name."""
    finder = _Modules(find)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def take(package: Package, file: str, symbol: str, **names: Any) -> Any:
    """Take a class, a function, or `Class.method`; what it looks up is in `names`, or a stub.

    Raises:
        KeyError: the release has no such symbol.
    """
    node = find_symbol(package.parse(file), symbol)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    node.decorator_list = []
    space = Names(**{**_KNOWN, **names})
    execute(node, space, file)
    return space[node.name]
