"""What `scripts/read-engines` reads of a release of vLLM."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from fp8calib.engines.facts.release import DEMANDED, OWN_TYPES
from fp8calib.engines.vllm.linears import MAPPERS, NO_MAPPER, NO_PAIRS
from fp8calib.engines.weights.reader import ACCEPTED
from tests.engines.check_handmade import MODELOPT
from tests.real_engines.package import Package, find_symbol
from tests.real_engines.release_configs import (
    LAYER,
    MX_CONFIGS,
    MX_PATHS,
    PARTS,
    make_compressed,
    make_group_config,
    make_mixed,
    open_vllm_configs,
)
from tests.real_engines.stubs import Names, take
from tests.real_engines.type_facts import Probe, read_auto_round, read_demanded, read_own_types
from tests.real_engines.vllm_gpus import read_multiplied, read_order, read_stored
from tests.real_engines.vllm_sources import (
    COMPRESSED,
    KV_CACHE,
    QUANTIZATION,
    make_layer,
    read_algorithms,
    read_modelopt_list,
    take_processing,
)
from tests.real_engines.vllm_sources import MODELOPT as MODELOPT_FILE

_CONVERTOR = "transformers_utils/model_arch_config_convertor.py"
_REGISTRY = "model_executor/models/registry.py"
_MAPPER, _MAPPER_NAME = "model_executor/models/utils.py", "hf_to_vllm_mapper"
_CACHE = "config/cache.py"
_TRITON = "v1/attention/backends/triton_attn.py"
_ORACLE = "fused_moe/oracle/fp8.py"
_MX_UTILITIES = f"{QUANTIZATION}utils/mxfp8_utils.py"
_PLAIN_TYPES = frozenset({"auto", "float16", "bfloat16", "CacheDType"})
_PLAIN_CACHE_TYPES = ("auto", "float16", "bfloat16", "fp8", "nvfp4")
"""How the other cache types begin: for none of them scales are made when tokens come."""
_QKV = f"{LAYER}.self_attn.qkv_proj"


def read_own_algorithms(package: Package) -> Iterator[str]:
    """Run the function that names the method of a ModelOpt config in a file of its own."""
    file = package.parse(_CONVERTOR)
    (owner,) = (
        node.name
        for node in file.body
        if isinstance(node, ast.ClassDef) and "_normalize_quantization_config" in ast.unparse(node)
    )
    normalize = take(package, _CONVERTOR, f"{owner}._normalize_quantization_config")
    for algorithm in read_algorithms(package):
        section = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        try:
            normalize(None, SimpleNamespace(quantization_config=section))
        except ValueError:
            continue
        yield algorithm


def read_modelopt_lists(package: Package) -> list[str]:
    """Run the function that reads a ModelOpt config; the list that wins comes first."""
    read = read_modelopt_list(package)
    names = [name for name in ("ignore", "exclude_modules") if read({**MODELOPT, name: [name]})]
    (first,) = read({**MODELOPT, **{name: [name] for name in names}}) or ()
    return sorted(names, key=lambda name: name != first)


def calculates_scales(package: Package) -> bool:
    """Tell whether an attention layer that calculates scales leaves those of the file."""
    layer = make_layer(0.5, 0.25)
    layer.calculate_kv_scales = True
    take_processing(package)(layer)
    return bool(layer._k_scale.item() == 1.0)


class _Names(dict[str, Any]):
    """What lines of code look up that ask for the GPU: the platform, or functions such as on_gfx11.

    Args:
        is_amd: whether it is a GPU of AMD.
        kind: the function that is true of it.
    """

    def __init__(self, *, is_amd: bool, kind: str = "") -> None:
        platform = SimpleNamespace(is_cuda=lambda: not is_amd, is_rocm=lambda: is_amd)
        super().__init__(self=SimpleNamespace(), current_platform=platform)
        self._kind = kind
        self.asked: list[str] = []

    def __missing__(self, name: str) -> Any:
        self.asked.append(name)
        return lambda: name == self._kind

    def run(self, code: str) -> bool:
        """Run the lines; give what they decide."""
        exec(code, {}, self)  # noqa: S102
        return bool(getattr(self["self"], _FLAG))


_FLAG = "supports_quant_query_input"


def read_query_gpus(package: Package) -> Iterator[str]:
    """Run the lines that decide whether the Triton backend takes a quantized q."""
    init = find_symbol(package.parse(_TRITON), "TritonAttentionImpl.__init__")
    lines = [ast.unparse(node) for node in ast.iter_child_nodes(init)]
    code = "\n".join(line for line in lines if _FLAG in line)
    code = re.sub(r"from \S+ import .*", "pass", code)
    if _Names(is_amd=False).run(code):
        yield "CUDA"
    other = _Names(is_amd=True)
    if other.run(code):
        kinds = [k for k in other.asked if not _Names(is_amd=True, kind=k).run(code)]
        names = " and ".join(kind.removeprefix("on_") for kind in kinds)
        yield f"AMD GPUs except {names}" if names else "AMD GPUs"


def read_cache_types(package: Package) -> Iterator[str]:
    """Read the cache types whose scales are made when tokens come."""
    literal = find_symbol(package.parse(_CACHE), "CacheDType")
    for node in ast.walk(literal):
        name = node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and (
            name.endswith("_per_token_head") or not name.startswith(_PLAIN_CACHE_TYPES)
        ):
            yield name


def read_offered_types(package: Package) -> Iterator[str]:
    """Read the values of --kv-cache-dtype that quantize."""
    literal = find_symbol(package.parse(_CACHE), "CacheDType")
    for node in ast.walk(literal):
        name = node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and name not in _PLAIN_TYPES:
            yield name


def read_backend_types(package: Package) -> Iterator[str]:
    """Run the functions that tell which backend of attention by heads stores what on which GPU."""
    offered = [each for each in read_offered_types(package) if not each.endswith("_ds_mla")]
    return read_stored(package, offered)


def has_class_first(package: Package) -> bool:
    """Run the choice between a group for a class and one that names the joined projections."""
    section = make_compressed("dynamic")
    named = [f"{LAYER}.self_attn.{part}" for part in PARTS["qkv_proj"]]
    section["config_groups"] |= {"group_1": make_group_config("alone", named)}
    return _choose(package, section, _QKV) == "quantized"


def ignores_joined(package: Package) -> bool:
    """Run the choice for joined projections whose own name an expression matches."""
    return _choose(package, make_compressed("dynamic", ignore=["re:.*qkv_proj"]), _QKV) == (
        "unquantized"
    )


def _choose(package: Package, section: Mapping[str, Any], path: str) -> str:
    name = "ModelOptMixedPrecisionConfig" if "quant_algo" in section else "CompressedTensorsConfig"
    configs = open_vllm_configs(package, name)
    return configs.choose(name, section, path, packed_modules_mapping=PARTS)


def read_mixed(package: Package, path: str) -> Iterator[str]:
    """Run the choice for a layer of a mixed precision, algorithm by algorithm."""
    for algorithm in ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"):
        if _choose(package, make_mixed(algorithm), path) == "quantized":
            yield algorithm


def read_mx(package: Package) -> Iterator[str]:
    """Run the choice for MXFP8 of each dialect: linears, experts, the output layer."""
    for form, (name, section) in MX_CONFIGS.items():
        configs = open_vllm_configs(package, name)
        for what, path in MX_PATHS.items():
            if configs.choose(name, section, path, packed_modules_mapping=PARTS) == "quantized":
                yield f"{form} {what}"


def uses_whole_range(package: Package) -> bool:
    """Run vLLM's own quantizer of MXFP8's inputs, which GPUs without FlashInfer use."""
    names = {"MXFP8_BLOCK_SIZE": 32, "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn}
    quantize = take(package, _MX_UTILITIES, "_mxfp8_e4m3_quantize_torch", **names)
    codes, exponents = quantize(torch.full((1, 32), 7.0))
    return (codes.float().tolist(), exponents.tolist()) == ([[448.0] * 32], [[121]])


def read_classes(package: Package) -> list[str]:
    """Read the classes of the registry but those of transformers and of the past."""
    found: set[str] = set()
    for node in package.parse(_REGISTRY).body:
        target = ast.unparse(node).partition("=")[0]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if "_MODELS" not in target or not isinstance(value, ast.Dict):
            continue
        if "TRANSFORMERS" in target or "PREVIOUS" in target:
            continue
        found |= {key.value for key in value.keys if isinstance(key, ast.Constant)}
    return sorted(found)


def read_mappers(package: Package) -> Iterator[str]:
    """Read the mapper of each class; those that rename by expressions or functions are left out."""
    mapper = dataclass(take(package, _MAPPER, "WeightsMapper", field=field, re=re))
    files = [name for name in package.files if "/model_executor/models/" in f"/{name}"]
    classes = {
        node.name: node
        for name in files
        for node in ast.parse(package.read_file(name)).body
        if isinstance(node, ast.ClassDef)
    }

    def find_mapper(name: str) -> Any:
        """Find that of a class; None where neither the class nor those that it extends have one."""
        for node in classes[name].body if name in classes else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _MAPPER_NAME:
                space = Names(_Lazy(find_mapper), WeightsMapper=mapper, re=re, regex=re)
                return eval(ast.unparse(node.value), {"__builtins__": {}}, space)  # noqa: S307
        bases = classes[name].bases if name in classes else ()
        found = (find_mapper(ast.unparse(base).partition("[")[0]) for base in bases)
        return next(filter(None, found), None)

    tree = package.parse(_REGISTRY)
    for table in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
        node = find_symbol(tree, table)
        assert isinstance(node, ast.Assign)
        for architecture, (_, name) in ast.literal_eval(node.value).items():
            try:
                found = find_mapper(name)
            except TypeError:
                continue
            if found is None:
                yield f"{architecture}: {NO_MAPPER}"
            elif not found.orig_to_new_regex and not found.orig_to_new_renaming:
                yield f"{architecture}: {' '.join(_list_pairs(found)) or NO_PAIRS}"


def _list_pairs(mapper: Any) -> Iterator[str]:
    """List what a mapper replaces, in its order; names that it drops are left out."""
    for kind, begin, end in (("substr", "", ""), ("prefix", "^", ""), ("suffix", "", "$")):
        for old, new in getattr(mapper, f"orig_to_new_{kind}").items():
            if new is not None:
                yield f"{begin}{old}{end}>{new}"


class _Lazy:
    """Gives a class of a release by its name, of which only the mapper is looked up."""

    def __init__(self, find_mapper: Callable[[str], Any]) -> None:
        self._find = find_mapper

    def __call__(self, name: str) -> Any:
        return SimpleNamespace(**{_MAPPER_NAME: self._find(name)})


def read_bfloat16_types(package: Package) -> Iterable[str]:
    """Read the model types that are not served in float16."""
    table = find_symbol(package.parse("config/model.py"), "_FLOAT16_NOT_SUPPORTED_MODELS")
    assert isinstance(table, ast.Assign)
    return list(ast.literal_eval(table.value))


def _contains(file: str, text: str) -> Any:
    return lambda package: text in package.read(file)


PROBES: Mapping[str, Probe] = {
    DEMANDED: Probe(read=read_demanded, source="Requires-Dist of the wheel", how="read"),
    OWN_TYPES: Probe(
        read=read_own_types("transformers_utils/"),
        source="transformers_utils/ model_type, _CONFIG_REGISTRY",
        how="read",
    ),
    "own-file-algorithm": Probe(
        read=read_own_algorithms,
        source=f"{_CONVERTOR} _normalize_quantization_config",
        how="run",
    ),
    "config.json-algorithm": Probe(
        read=read_algorithms, source=f"{MODELOPT_FILE} QUANT_ALGOS", how="read"
    ),
    "modelopt-list": Probe(
        read=read_modelopt_lists,
        source=f"{MODELOPT_FILE} ModelOptQuantConfigBase.from_config",
        how="run",
    ),
    "--calculate-kv-scales exists: the scales are then those of the first batch": Probe(
        read=calculates_scales,
        source=f"{KV_CACHE} BaseKVCacheMethod.process_weights_after_loading",
        how="run",
    ),
    "Triton backend quantizes q on": Probe(
        read=read_query_gpus, source=f"{_TRITON} TritonAttentionImpl.__init__", how="run"
    ),
    "cache type without scales of a file": Probe(
        read=read_cache_types, source=f"{_CACHE} CacheDType", how="read"
    ),
    "--kv-cache-dtype": Probe(read=read_offered_types, source=f"{_CACHE} CacheDType", how="read"),
    "backend stores a cache type on": Probe(
        read=read_backend_types,
        source="v1/attention/backend.py AttentionBackend.validate_configuration, with each GPU "
        "simulated",
        how="run",
    ),
    "order of the backends on": Probe(
        read=read_order,
        source="platforms/cuda.py _get_backend_priorities; platforms/rocm.py "
        "_get_backend_priorities",
        how="run",
    ),
    "GPU multiplies quantized inputs in": Probe(
        read=read_multiplied,
        source="compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py get_min_capability; "
        "platforms/interface.py supports_fp8; kernels/linear/mxfp8/flashinfer.py is_supported; "
        "kernels/linear/mxfp8/rocm_native.py is_supported",
        how="run",
    ),
    "platforms register cache types of their own": Probe(
        read=_contains(_CACHE, "def register_kv_cache_dtype"),
        source=f"{_CACHE} register_kv_cache_dtype",
        how="read",
    ),
    "joined projections have the target of their class before that of their names": Probe(
        read=has_class_first,
        source=f"{QUANTIZATION}compressed_tensors/utils.py find_matched_target",
        how="run",
    ),
    "an expression in ignore may match the name of joined projections": Probe(
        read=ignores_joined, source=f"{COMPRESSED} get_quant_method", how="run"
    ),
    **{
        f"mixed precision {what}": Probe(
            read=lambda package, path=path: read_mixed(package, path),
            source=f"{MODELOPT_FILE} ModelOptMixedPrecisionConfig.get_quant_method",
            how="run",
        )
        for what, path in (
            ("linear", f"{LAYER}.self_attn.o_proj"),
            ("expert", f"{LAYER}.mlp.experts"),
        )
    },
    "MXFP8 is loaded as MXFP8": Probe(
        read=read_mx,
        source=f"{COMPRESSED} _get_scheme_from_parts; {MODELOPT_FILE} ModelOptMxFp8Config",
        how="run",
    ),
    "inputs of MXFP8 use the whole range of e4m3 without FlashInfer": Probe(
        read=uses_whole_range,
        source=f"{_MX_UTILITIES} _mxfp8_e4m3_quantize_torch",
        how="run",
    ),
    "the scales of experts are repeated for smaller blocks": Probe(
        read=_contains(_ORACLE, "def refine_fp8_moe_block_shape"),
        source=f"{_ORACLE} refine_fp8_moe_block_shape",
        how="read",
    ),
    "served in bfloat16 where the checkpoint is in float16": Probe(
        read=read_bfloat16_types,
        source="config/model.py _FLOAT16_NOT_SUPPORTED_MODELS",
        how="read",
    ),
    MAPPERS: Probe(
        read=read_mappers,
        source="hf_to_vllm_mapper of models/; models/utils.py WeightsMapper",
        how="read",
    ),
    ACCEPTED: Probe(
        read=read_auto_round,
        source="quantization/inc/inc.py INCConfig; quantization/inc/schemes/",
        how="read",
    ),
    "class": Probe(read=read_classes, source=_REGISTRY, how="read", is_difference=True),
}
