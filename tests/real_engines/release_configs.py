"""The config classes of a release of vLLM or SGLang, run on layers that only have a class.

The modules of `layers/quantization/` are executed without their imports. What they look up beside
each other is a `Marker`, a class that remembers with which arguments it was called.
"""

import ast
import builtins
import contextlib
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)

from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.weights.forms import CompressedGroup
from fp8calib.engines.weights.linears import LinearGroup, StoredLinear
from fp8calib.engines.weights.reader import LinearReader, Unquantized
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.schemes import InputScaling
from tests.real_engines.package import Package, execute
from tests.real_engines.stubs import Names, answer_imports

LAYER = "model.layers.0"
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PATHS: Mapping[str, str] = {
    f"{LAYER}.self_attn.qkv_proj": "QKVParallelLinear",
    f"{LAYER}.self_attn.o_proj": "RowParallelLinear",
    f"{LAYER}.mlp.gate_up_proj": "MergedColumnParallelLinear",
    f"{LAYER}.mlp.down_proj": "RowParallelLinear",
    f"{LAYER}.mlp.shared_experts.down_proj": "RowParallelLinear",
    f"{LAYER}.mlp.experts": "FusedMoE",
    "lm_head": "ParallelLMHead",
}
"""The modules of a model, with their classes."""
NOTHING = ScaleFolder(path=Path("no-folder"), config={}, tensors={}, scales={})
EMPTY = ModelGeometry(architecture="", model_type="", checkpoint_dtype="bfloat16", layers=())
_DATA: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SCHEMES: Mapping[str, Sequence[object]] = _DATA["pairs"]
MX_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = _DATA["mx"]
"""By dialect: vLLM's class of its config, and a config of MXFP8."""
MX_PATHS = {
    "linear": f"{LAYER}.self_attn.o_proj",
    "experts": f"{LAYER}.mlp.experts",
    "head": "lm_head",
}
LISTS: Sequence[list[str]] = _DATA["lists"]
_KEPT = ("Config", "ConfigBase", "CompressedTensorsMoEMethod")
"""How the names of the classes end that are executed."""
_LEFT_OUT = (ast.If, ast.Try, ast.With, ast.Expr, ast.Import, ast.ImportFrom)


class Layer:
    """Any layer; `LinearBase` and others are subclasses."""


_ATTRIBUTES = {
    **dict.fromkeys(("moe_config", "use_triton_kernels", "use_flashinfer_trtllm_moe")),
    "layer_name": f"{LAYER}.mlp.experts",
    **{f"ckpt_{each}_name": each for each in ("gate_proj", "up_proj", "down_proj")},
}


def _make_layers() -> dict[str, type]:
    linear = type("LinearBase", (Layer,), {})
    made = {"LinearBase": linear}
    for kind in set(PATHS.values()):
        base = linear if kind.endswith("Linear") else Layer
        made[kind] = type(kind, (base,), _ATTRIBUTES)
    for kind in ("Attention", "MLAAttention", "RadixAttention", "VocabParallelEmbedding"):
        made[kind] = type(kind, (Layer,), {})
    made["RoutedExperts"] = type("RoutedExperts", (made["FusedMoE"],), {})
    return made


_LAYERS = _make_layers()


class ReleaseConfigs:
    """The config classes of a release.

    Args:
        files: the texts of the modules that define them, those that others use first.
        experts: the name of the class of a layer's experts.
    """

    def __init__(self, files: Iterable[str], experts: str = "FusedMoE") -> None:
        self._experts = experts
        self._space = Names(
            **{**_LAYERS, "RoutedExperts": _LAYERS[experts]},
            QuantizationConfig=type("QuantizationConfig", (), dict(_CONFIG_METHODS)),
            CompressionFormat=CompressionFormat,
            QuantizationArgs=QuantizationArgs,
            QuantizationStrategy=QuantizationStrategy,
            QuantizationType=QuantizationType,
            ActivationOrdering=ActivationOrdering,
            MappingProxyType=MappingProxyType,
            ACTIVATION_SCHEMES=["static", "dynamic"],
            FP8_WEIGHTS=("FP8",),
            Any=Any,
            cast=typing.cast,
            fnmatch=fnmatch,
            get_linear_transform_schemes=lambda *_: ({}, {}),
            lru_cache=lru_cache,
            re=re,
            torch=torch,
            suppress=contextlib.suppress,
            __builtins__=Names(**vars(builtins)),  # where bodies of classes look
            __name__="vllm.release.module",
            __package__="vllm.release",
        )
        for text in files:
            self._run(text)

    def _run(self, text: str) -> None:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.endswith(_KEPT):
                continue
            if isinstance(node, _LEFT_OUT):
                continue
            if isinstance(node, ast.ClassDef):
                bases = (each for each in node.bases if isinstance(each, ast.Name))
                node.bases = [each for each in bases if isinstance(self._space[each.id], type)]
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                node.decorator_list = [
                    each for each in node.decorator_list if "lru_cache" in ast.unparse(each)
                ]
            execute(node, self._space, "release")

    def choose(self, config: str, section: Mapping[str, Any], path: str, **attributes: Any) -> str:
        """Give what a release makes of a module, in the words of `describe_group`.

        Args:
            config: the name of the class of the config.
            section: the quantization config.
            path: of the module.
            attributes: of the config's object, set before it is asked.
        """
        kind = PATHS[path]
        layer = _LAYERS[self._experts if kind == "FusedMoE" else kind]()
        cls = self._space[config]
        cls._check_scheme_supported = lambda *_, match_exact=False, **__: not match_exact
        try:
            with answer_imports(self._space.__getitem__):
                made = cls.from_config(json.loads(json.dumps(section)))
                vars(made).update(attributes)
                method = made.get_quant_method(layer, path)
        except AttributeError as error:
            if "NoneType" not in str(error):
                raise
            return "refused"
        except _ERRORS:
            return "refused"
        return _describe(method, layer)


_ERRORS = (AssertionError, ImportError, KeyError, NotImplementedError, RuntimeError, ValueError)


def _get_from_keys(config: Mapping[str, Any], keys: list[str]) -> Any:
    for key in keys:
        if key in config:
            return config[key]
    raise ValueError(keys)


def _get_from_keys_or(config: Mapping[str, Any], keys: list[str], default: Any) -> Any:
    return next((config[key] for key in keys if key in config), default)


_CONFIG_METHODS: Mapping[str, Any] = {
    "__init__": lambda self: setattr(self, "packed_modules_mapping", dict(PARTS)),
    "get_from_keys": staticmethod(_get_from_keys),
    "get_from_keys_or": staticmethod(_get_from_keys_or),
}


def _describe(method: Any, layer: Any) -> str:
    if method is None:
        return "refused" if isinstance(layer, _LAYERS["LinearBase"]) else "unquantized"
    if "Unquantized" in method.stub_name:
        is_linear = method.stub_name == "UnquantizedLinearMethod"
        is_wrong = is_linear and isinstance(layer, _LAYERS["FusedMoE"])
        return "refused" if is_wrong else "unquantized"
    scheme = vars(layer).get("scheme", method)
    name = scheme.stub_name
    if "CompressedTensors" in name and "WNA16" in name:
        return "refused"
    is_static = scheme.stub_arguments.get("is_static_input_scheme")
    return "alone" if "CompressedTensorsW8A16" in name and not is_static else "quantized"


def make_group(path: str, state: str) -> LinearGroup:
    """Make the group of a module, which the engine's class creates in this way."""
    parent, _, name = path.rpartition(".")
    kind = {"FusedMoE": "experts", "ParallelLMHead": "head"}.get(PATHS[path], "linear")
    modules = [f"{parent}.{part}" for part in PARTS.get(name, (name,))] if parent else [path]
    if kind == "experts":
        modules = [
            f"{path}.{i}.{p}" for i in range(2) for p in ("gate_proj", "up_proj", "down_proj")
        ]
    members = (StoredLinear(module=each, shape=(256, 256), tensors={}) for each in modules)
    return LinearGroup(path=path, kind=kind, members=tuple(members), state=state, listed=path)


def describe_group(make: Callable[[], LinearReader], path: str, state: str = "config") -> str:
    """Give what `check` expects of a module in one word; "unknown" where it expects nothing."""
    try:
        reader = make()
        found = reader.find_configured(make_group(path, state))
    except Unjudged:
        return "unknown"
    except Refusal:
        return "refused"
    if isinstance(found, Unquantized):
        return "unquantized"
    if isinstance(found, CompressedGroup):
        return "quantized"
    return "alone" if found.inputs is InputScaling.NONE else "quantized"


def list_compressed() -> Iterable[Mapping[str, Any]]:
    """List configs of compressed-tensors."""
    for name in SCHEMES:
        yield make_compressed(name)
        for form in ("mixed-precision", "pack-quantized", "nvfp4-pack-quantized"):
            yield {**make_compressed(name), "format": form}
            yield {**make_compressed(name, format="float-quantized"), "format": form}
    for ignore in LISTS:
        yield make_compressed("dynamic", ignore=ignore)
    for targets in (
        ["re:.*self_attn.*"],
        [f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj"],
        [f"{LAYER}.self_attn.{part}" for part in PARTS["qkv_proj"]],
        ["Linear", "lm_head"],
        ["Linear", "re:.*lm_head"],
        ["re:.*experts.*"],
        [],
    ):
        yield make_compressed("dynamic", targets=targets)


def list_fp8() -> Iterable[Mapping[str, Any]]:
    """List configs of the `fp8` method."""
    for key in ("ignored_layers", "modules_to_not_convert"):
        for entries in LISTS:
            yield {"quant_method": "fp8", "activation_scheme": "dynamic", key: entries}


def list_modelopt() -> Iterable[Mapping[str, Any]]:
    """List ModelOpt's configs with one algorithm."""
    for entries in LISTS:
        yield {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": entries}
        section = {"quant_algo": "FP8", "exclude_modules": entries}
        yield {"producer": {"name": "modelopt"}, "quantization": section}


def list_mixed() -> Iterable[Mapping[str, Any]]:
    """List ModelOpt's configs of a mixed precision."""
    return map(make_mixed, ("FP8", "FP8_PB_WO"))


CONFIGS: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]] = {
    "CompressedTensorsConfig": list_compressed,
    "Fp8Config": list_fp8,
    "ModelOptFp8Config": list_modelopt,
    "ModelOptMixedPrecisionConfig": list_mixed,
}
"""The configs that are asked, by the class that reads them."""

_VLLM = "vllm/model_executor/layers/quantization/"
_VLLM_MODULES = (
    f"{_VLLM}utils/config_utils.py",
    f"{_VLLM}compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py",
    f"{_VLLM}compressed_tensors/compressed_tensors_moe.py",
    f"{_VLLM}compressed_tensors/utils.py",
    f"{_VLLM}utils/quant_utils.py",
)
"""What the classes use; some releases lack some of them."""
_VLLM_OWN = {
    "CompressedTensorsConfig": f"{_VLLM}compressed_tensors/compressed_tensors.py",
    "Fp8Config": f"{_VLLM}fp8.py",
}
"""The file of a class; that of ModelOpt for others."""
_SGLANG = "sglang/srt/layers/quantization/"
_SGLANG_MODULES: Mapping[str, tuple[str, ...]] = {
    "CompressedTensorsConfig": tuple(
        f"{_SGLANG}compressed_tensors/{name}.py"
        for name in ("utils", "compressed_tensors_moe", "compressed_tensors")
    ),
    "Fp8Config": (f"{_SGLANG}utils.py", f"{_SGLANG}fp8.py"),
}


def open_vllm_configs(package: Package, name: str) -> ReleaseConfigs:
    """Take a class of configs of vLLM, with what it uses."""
    files = (*_VLLM_MODULES, _VLLM_OWN.get(name, f"{_VLLM}modelopt.py"))
    texts = (package.read(file) for file in files if package.has(file))
    return ReleaseConfigs(texts, "RoutedExperts")


def open_sglang_configs(package: Package, name: str) -> ReleaseConfigs:
    """Take a class of configs of SGLang, with what it uses."""
    modelopt = (f"{_SGLANG}utils.py", f"{_SGLANG}modelopt_quant.py")
    files = _SGLANG_MODULES.get(name, modelopt)
    return ReleaseConfigs(package.read(file) for file in files if package.has(file))


def make_group_config(scheme: str, targets: Sequence[str]) -> dict[str, Any]:
    """Make a config group of compressed-tensors."""
    weights, inputs = SCHEMES[scheme]
    return {"weights": weights, "input_activations": inputs, "targets": [*targets]}


def make_compressed(
    scheme: str, *, ignore: Sequence[str] = (), targets: Sequence[str] = ("Linear",), **more: object
) -> dict[str, Any]:
    """Make a config of compressed-tensors with one group; `more` changes the group."""
    group = {**make_group_config(scheme, targets), **more}
    whole = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**whole, "config_groups": {"group_0": group}, "ignore": [*ignore]}


def make_mixed(algorithm: str) -> dict[str, Any]:
    """Make a ModelOpt config of a mixed precision."""
    names = [
        *(f"{LAYER}.self_attn.{part}" for part in (*PARTS["qkv_proj"], "o_proj")),
        f"{LAYER}.mlp.experts.0.gate_proj",
    ]
    layers = {name: {"quant_algo": algorithm} for name in names}
    layers[f"{LAYER}.mlp.down_proj"] = {"quant_algo": "NVFP4"}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["lm_head"],
        "quantized_layers": layers,
    }
