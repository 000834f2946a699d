"""What vLLM's own functions say a GPU serves, each asked with that GPU simulated.

The classes of the attention backends are taken out of the package with all that they call. What
needs a GPU, or another package, is answered in `_make_answers`, as where all of them are installed.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from fp8calib.engines.gpus import GENERATIONS, HEAD_SIZES
from tests.real_engines.package import Package, execute, find_symbol, list_names

_BACKENDS = "vllm/v1/attention/backends/"
_INTERFACE = "vllm/platforms/interface.py"
_FP8_SCHEME = (
    "vllm/model_executor/layers/quantization/compressed_tensors/schemes/"
    "compressed_tensors_w8a8_fp8.py"
)
_FP8_CLASS = "CompressedTensorsW8A8Fp8"
_MX_KERNELS = (
    "linear/mxfp8/flashinfer.py FlashInferCutlassMxfp8LinearKernel",
    "linear/mxfp8/rocm_native.py RocmDotScaledMxfp8LinearKernel",
)
"""The kernels of MXFP8 that multiply quantized inputs."""
_PLATFORM = "current_platform"
_PLATFORMS = {"sm": "CudaPlatformBase", "gfx": "RocmPlatform"}
_LISTS = {"sm": "vllm/platforms/cuda.py", "gfx": "vllm/platforms/rocm.py"}


class Space(dict[str, Any]):
    """The names of one file of a package; one that is looked up is executed then, and no other.

    Args:
        linker: opens the files that names are imported from.
        file: its path in the package.
    """

    def __init__(self, linker: Linker, file: str) -> None:
        super().__init__(__name__=__name__, __builtins__=builtins, __annotations__={})
        self._linker, self._file = linker, file
        tree = linker.package.parse(file)
        _move_imports(tree)
        self._nodes = {name: node for node in _list_statements(tree) for name in list_names(node)}
        self._imported = dict(_list_imported(tree, file))

    def __missing__(self, name: str) -> Any:
        found: Any
        if name in self._linker.answers:
            found = self._linker.answers[name]
        elif name in self._nodes:
            node = self._nodes[name]
            if isinstance(node, ast.ClassDef):
                self._prepare(node)
            execute(node, self, self._file)
            found = self[name]
        elif name in self._imported:
            found = self._linker.find(*self._imported[name])
        else:
            raise KeyError(name)
        self[name] = found
        return found

    def take(self, method: str) -> Callable[..., Any]:
        """Take `Class.method` without its class."""
        owner, _, name = method.partition(".")
        node = self._find_method(owner, name)
        assert node is not None
        node.decorator_list = []
        execute(node, self, self._file)
        return self[name]  # type: ignore[no-any-return]

    def has_method(self, owner: str, name: str) -> bool:
        """Whether a class defines a method itself."""
        return self._find_method(owner, name) is not None

    def _find_method(self, owner: str, name: str) -> ast.FunctionDef | None:
        body = getattr(self._nodes[owner], "body", [])
        found = (each for each in body if isinstance(each, ast.FunctionDef) and each.name == name)
        return next(found, None)

    def _prepare(self, owner: ast.ClassDef) -> None:
        """Keep of a class what tells what it supports, and look up what its body names."""
        owner.body = [each for each in owner.body if _is_kept(each)] or [ast.Pass()]
        own = {name for each in owner.body for name in list_names(each)}
        read: list[ast.AST] = [*owner.bases, *owner.keywords, *owner.decorator_list]
        for each in owner.body:
            if isinstance(each, ast.FunctionDef):
                read += [*each.decorator_list, *each.args.defaults, *each.args.kw_defaults]
            elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
                read.append(each.value)
        for each in read:
            names = (one.id for one in ast.walk(each) if isinstance(one, ast.Name)) if each else ()
            for name in names:
                if name not in own and not hasattr(builtins, name):
                    self[name]


_ASKED = re.compile(r"supports_|get_supported_|validate_|is_|has_|__[a-z]+__$|get_device_|to_int")


def _is_kept(node: ast.stmt) -> bool:
    """Whether a class keeps what its body defines: all but methods that compute."""
    return not isinstance(node, ast.FunctionDef) or bool(_ASKED.match(node.name))


class Linker:
    """Gives classes and functions of a package that call one another as if it were imported.

    Args:
        package: of the engine.
        answers: by name, what is not taken out of it.
    """

    def __init__(self, package: Package, answers: Mapping[str, Any]) -> None:
        self.package, self.answers = package, dict(answers)
        self._spaces: dict[str, Space] = {}

    def open(self, file: str) -> Space:
        """Open the names of a file."""
        if file not in self._spaces:
            self._spaces[file] = Space(self, file)
        return self._spaces[file]

    def find(self, module: str, name: str) -> Any:
        """Find what a module of the package, or of Python and torch, has by a name."""
        if module.partition(".")[0] != "vllm":
            found = importlib.import_module(module)
            return getattr(found, name) if name else found
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self.package.files:
                return self.open(file)[name]
        raise KeyError(f"{module} {name}")


def _list_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """List what a file defines, also under a condition: the first definition comes last."""
    for node in reversed(tree.body):
        if isinstance(node, ast.If | ast.Try):
            yield from _list_statements(ast.Module(body=node.body, type_ignores=[]))
        else:
            yield node


def _move_imports(tree: ast.Module) -> None:
    """Move the imports of functions to the file, where they are looked up as other names are."""
    mover = _ImportMover()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [mover.visit(each) for each in node.body]
    tree.body = [*mover.found, *tree.body]


class _ImportMover(ast.NodeTransformer):
    """Collects the imports of functions, and leaves nothing in their places."""

    def __init__(self) -> None:
        self.found: list[ast.stmt] = []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        """Take an import out."""
        self.found.append(node)
        return ast.copy_location(ast.Pass(), node)


def _list_imported(tree: ast.Module, file: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """List what a file imports: the name in it, the module and the name there."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            parents = file.split("/")[: -node.level] if node.level else []
            module = ".".join([*parents, node.module])
            yield from ((each.asname or each.name, (module, each.name)) for each in node.names)
        elif isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                yield each.asname or top, (each.name if each.asname else top, "")


class Gpu:
    """A simulated GPU in a package of vLLM.

    Args:
        package: of vLLM.
        name: of its generation: sm_90, gfx942.
    """

    def __init__(self, package: Package, name: str) -> None:
        self.package, self.name = package, name
        self.kind = re.match("[a-z]+", name).group()  # type: ignore[union-attr]
        self.linker = Linker(package, self._make_answers())
        interface = self.linker.open(_INTERFACE)
        digits = name.removeprefix(self.kind).removeprefix("_")
        digits = digits if self.kind == "sm" else digits[:-1]  # the last one is a stepping
        major, minor = digits[:-1], digits[-1]
        self.capability = interface["DeviceCapability"](int(major), int(minor))
        own = self.linker.open(_LISTS[self.kind])
        methods = {
            name: own.take(f"{_PLATFORMS[self.kind]}.{name}")
            for name in ("supports_fp8", "supports_mx")
            if own.has_method(_PLATFORMS[self.kind], name)
        }
        self.linker.answers[_PLATFORM] = type(
            "Platform",
            (interface["Platform"],),
            {
                "_enum": interface["PlatformEnum"][{"sm": "CUDA", "gfx": "ROCM"}[self.kind]],
                "get_device_capability": classmethod(lambda *_, **__: self.capability),
                **{name: classmethod(method) for name, method in methods.items()},
            },
        )()

    def _make_answers(self) -> Mapping[str, Any]:
        """Answer what needs the GPU or another package: all are there that the GPU can use."""
        has_fa3 = self.name == "sm_90"
        has_fa4 = self.name in {"sm_90", "sm_100", "sm_103"}
        versions = {2: True, 3: has_fa3, 4: has_fa4}
        is_on = lambda *_, **__: True  # noqa: E731
        return {
            "AttentionBackendEnum": _Echo(),
            "envs": _Echo(value=None),
            "has_nvidia_artifactory": is_on,
            "has_flashinfer": is_on,
            "is_fa_version_supported": versions.__getitem__,
            "get_current_vllm_config_or_none": lambda: None,
            "get_b12x_paged_attention": lambda: SimpleNamespace(is_supported=is_on),
            "is_aiter_found_and_supported": is_on,
            "rocm_aiter_ops": _Echo(value=is_on),
            "_GCN_ARCH": self.name,
            "logger": _Echo(value=lambda *_, **__: None),
        }

    def list_ordered(self) -> list[str]:
        """List the backends that vLLM tries for attention by heads, the first choice first."""
        choose = self.linker.open(_LISTS[self.kind])["_get_backend_priorities"]
        arguments = {"sm": {"device_capability": self.capability}, "gfx": {"use_sparse": False}}
        wanted = inspect.signature(choose).parameters
        given = {"use_mla": False, **arguments[self.kind]}
        return list(choose(**{name: given[name] for name in wanted if name in given}))

    def explain(self, backend: str, cache_type: str, head_size: int) -> list[str]:
        """Give the reasons for which a backend (file and class) refuses; empty where it serves."""
        file, _, name = backend.partition(" ")
        owner = self.linker.open(file)[name]
        (dtype, *_) = [d for d in (torch.bfloat16, torch.float16) if owner.supports_dtype(d)]
        values = {
            "head_size": head_size,
            "dtype": dtype,
            "kv_cache_dtype": cache_type,
            "device_capability": self.capability,
            "attn_type": "decoder",
            "block_size": None,
        }
        wanted = inspect.signature(owner.validate_configuration).parameters
        given = {name: False for name in wanted if name.startswith(("use_", "has_"))}
        known = {name: value for name, value in values.items() if name in wanted}
        return list(owner.validate_configuration(**given, **known))


class _Echo:
    """Gives for every attribute its name, or one value."""

    def __init__(self, **value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return self._value.get("value", name)


@cache
def make_gpus(package: Package) -> Sequence[Gpu]:
    """Make the GPUs of all generations."""
    return [Gpu(package, name) for name in GENERATIONS]


def list_places(package: Package) -> Mapping[str, str]:
    """List the backends: by name, their file and class."""
    enum = find_symbol(package.parse(f"{_BACKENDS}registry.py"), "AttentionBackendEnum")
    assert isinstance(enum, ast.ClassDef)
    found = {}
    for node in enum.body:
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Constant) and str(value.value).startswith("vllm."):
            module, _, owner = str(value.value).rpartition(".")
            found[list_names(node)[0]] = f"{module.replace('.', '/')}.py {owner}"
    return found


def read_order(package: Package) -> Iterator[str]:
    """Run the functions that order the backends for attention by heads."""
    found: dict[str, list[str]] = {}
    for gpu in make_gpus(package):
        found.setdefault(", ".join(gpu.list_ordered()).lower(), []).append(gpu.name)
    yield from (f"{order}: {', '.join(names)}" for order, names in found.items())


def read_stored(package: Package, types: Sequence[str]) -> Iterator[str]:
    """Ask each backend that vLLM chooses itself which cache types it stores on which GPU."""
    places = list_places(package)
    found: dict[str, dict[str, list[str]]] = {}
    for gpu in make_gpus(package):
        for backend in gpu.list_ordered():
            for cache_type in types:
                refused = [
                    str(size)
                    for size in HEAD_SIZES
                    if gpu.explain(places[backend], cache_type, size)
                ]
                if len(refused) < len(HEAD_SIZES):
                    of_place = found.setdefault(f"{backend.lower()}: {cache_type}", {})
                    of_place.setdefault(" ".join(refused), []).append(gpu.name)
    for place, groups in sorted(found.items()):
        parts = (
            f"{', '.join(names)}{f' but heads of {refused}' if refused else ''}"
            for refused, names in groups.items()
        )
        yield f"{place}: {'; '.join(parts)}"


def read_multiplied(package: Package) -> Iterator[str]:
    """Ask the schemes of FP8 and MXFP8 with quantized inputs on which GPU they run as such."""
    fp8, mx = [], []
    for gpu in make_gpus(package):
        least = gpu.linker.open(_FP8_SCHEME).take(f"{_FP8_CLASS}.get_min_capability")(None)
        platform = gpu.linker.answers[_PLATFORM]
        if gpu.capability.to_int() >= least and platform.supports_fp8():
            fp8.append(gpu.name)
        if any(_is_supported(gpu, *place.split()) for place in _MX_KERNELS):
            mx.append(gpu.name)
    yield from (f"{name}: {', '.join(names)}" for name, names in (("fp8", fp8), ("mxfp8", mx)))


def _is_supported(gpu: Gpu, file: str, kernel: str) -> bool:
    if not gpu.package.has(file):
        return False
    place = next(each for each in gpu.package.files if each.endswith(file))
    supports, _ = gpu.linker.open(place)[kernel].is_supported()
    return bool(supports)
