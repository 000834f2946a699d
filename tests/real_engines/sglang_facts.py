"""What `scripts/read-engines` reads of a release of SGLang."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fp8calib.engines.facts.release import DEMANDED, OWN_TYPES
from fp8calib.engines.status import Evidence
from fp8calib.engines.weights.reader import ACCEPTED
from tests.real_engines.package import Package
from tests.real_engines.release_configs import (
    LAYER,
    MX_CONFIGS,
    MX_PATHS,
    PARTS,
    make_compressed,
    make_mixed,
    open_sglang_configs,
)
from tests.real_engines.sglang_models import SglangModels
from tests.real_engines.sglang_survey import survey_release
from tests.real_engines.stubs import take
from tests.real_engines.type_facts import Probe, read_auto_round, read_demanded, read_own_types

_O = f"{LAYER}.self_attn.o_proj"
_COMPRESSED = "compressed_tensors/compressed_tensors.py"
_CONFIG = "srt/configs/model_config.py"
_MODELS = "srt/models/"


def choose(package: Package, section: Mapping[str, Any], path: str) -> str:
    """Run the choice of a linear's scheme by a config."""
    name = "ModelOptMixedPrecisionConfig" if "quant_algo" in section else "CompressedTensorsConfig"
    whole = {**section, "packed_modules_mapping": PARTS}
    return open_sglang_configs(package, name).choose(name, whole, path)


def reads_group_formats(package: Package) -> bool:
    """Run the choice for a group with a format of its own."""
    section = make_compressed("dynamic", format="float-quantized")
    return choose(package, {**section, "format": "mixed-precision"}, _O) == "quantized"


def takes_channels_alone(package: Package) -> bool:
    """Run the choice for weights per channel whose inputs are not quantized."""
    return choose(package, make_compressed("channel-alone"), _O) == "alone"


def matches_ends(package: Package) -> bool:
    """Run the choice for a linear a part of whose path is in the list."""
    parts = choose(package, make_compressed("dynamic", ignore=["self_attn"]), _O)
    ends = choose(package, make_compressed("dynamic", ignore=["o_proj"]), _O)
    return (parts, ends) == ("quantized", "unquantized")


def quantizes_head(package: Package) -> bool:
    """Run the choice for an output layer that a group names."""
    section = make_compressed("dynamic", targets=["Linear", "lm_head"])
    return choose(package, section, "lm_head") == "quantized"


def read_mixed(package: Package, path: str) -> list[str]:
    """Run the choice for a layer of a mixed precision, algorithm by algorithm."""
    algorithms = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN")
    return [each for each in algorithms if choose(package, make_mixed(each), path) == "quantized"]


def read_mx(package: Package) -> Iterator[str]:
    """Run the choice for MXFP8 of each dialect; ModelOpt's becomes `mxfp8` or is taken for FP8."""
    unwrap = "unwrap_modelopt_quantization_config"
    names = {unwrap: take(package, _CONFIG, unwrap)} if unwrap in package.read(_CONFIG) else {}
    parse = take(package, _CONFIG, "ModelConfig._parse_modelopt_quant_config", **names)
    for form, (_, section) in MX_CONFIGS.items():
        is_modelopt = form == "modelopt"
        parsed = parse(None, {"quantization": section}) if is_modelopt else section
        if is_modelopt and parsed["quant_method"] != "mxfp8":
            continue
        name = "CompressedTensorsConfig" if "config_groups" in parsed else "Fp8Config"
        configs = open_sglang_configs(package, name)
        whole = {**parsed, "packed_modules_mapping": PARTS}
        for what, path in MX_PATHS.items():
            if configs.choose(name, whole, path) == "quantized":
                yield f"{form} {what}"


def _survey(
    read: Callable[[Mapping[str, Any]], Iterable[str] | bool], source: str, how: Evidence
) -> Probe:
    """Make a probe of what the models of a release do."""
    return Probe(read=lambda package: read(survey_release(package)), source=source, how=how)


_CHOICE = f"{_COMPRESSED} CompressedTensorsConfig.get_quant_method"
_ARGUMENTS = ("srt/arg_groups/fields/model.py", "srt/server_args.py")
_PLAIN_TYPES = frozenset({"auto", "bf16", "bfloat16"})


def read_cache_types(package: Package) -> Iterator[str]:
    """Read the values of --kv-cache-dtype that quantize."""
    for file in _ARGUMENTS:
        if not package.has(file):
            continue
        for node in ast.walk(package.parse(file)):
            listed = node.elts if isinstance(node, ast.List) else []
            names = [each.value for each in listed if isinstance(each, ast.Constant)]
            if {"auto", "fp8_e4m3", "fp8_e5m2"} <= {*names}:
                yield from (name for name in names if name not in _PLAIN_TYPES)
                return


PROBES: Mapping[str, Probe] = {
    DEMANDED: Probe(read=read_demanded, source="Requires-Dist of the wheel", how="read"),
    OWN_TYPES: Probe(
        read=read_own_types("srt/configs/", "srt/utils/hf_transformers"),
        source="srt/configs/ model_type; srt/utils/hf_transformers/common.py _CONFIG_REGISTRY",
        how="read",
    ),
    "--kv-cache-dtype": Probe(read=read_cache_types, source=" ".join(_ARGUMENTS), how="read"),
    ACCEPTED: Probe(
        read=read_auto_round,
        source="srt/layers/quantization/auto_round.py AutoRoundConfig",
        how="read",
    ),
    "class": Probe(
        read=lambda package: sorted(SglangModels(package).entries),
        source=f"{_MODELS} EntryClass",
        how="read",
    ),
    "the format of a config group is read": Probe(
        read=reads_group_formats,
        source=f"{_COMPRESSED} CompressedTensorsConfig.from_config",
        how="run",
    ),
    "FP8 weights alone, per channel, are not taken for packed integers": Probe(
        read=takes_channels_alone,
        source=f"{_COMPRESSED} CompressedTensorsConfig.get_linear_scheme",
        how="run",
    ),
    "an entry of ignore matches the end of a path, and no part of it in either case": Probe(
        read=matches_ends,
        source="compressed_tensors/utils.py should_ignore_layer",
        how="run",
    ),
    "compressed-tensors quantizes the output layer": Probe(
        read=quantizes_head, source=_CHOICE, how="run"
    ),
    "MXFP8 is loaded as MXFP8": Probe(
        read=read_mx,
        source=f"{_CONFIG} ModelConfig._parse_modelopt_quant_config; fp8.py Fp8Config; {_CHOICE}",
        how="run",
    ),
    **{
        f"mixed precision {what}": Probe(
            read=lambda package, path=path: read_mixed(package, path),
            source="modelopt_quant.py ModelOptMixedPrecisionConfig.get_quant_method",
            how="run",
        )
        for what, path in (("linear", _O), ("expert", f"{LAYER}.mlp.experts"))
    },
    "attention of this model type has no parameters for KV scales": _survey(
        lambda found: sorted(name for name, has_one in found["places"].items() if not has_one),
        f"{_MODELS} RadixAttention",
        "read",
    ),
    "class of this model type reads a file of scales": _survey(
        lambda found: sorted(found["files"]),
        f"{_MODELS} load_kv_cache_scales",
        "read",
    ),
    "compressed-tensors' attention has parameters for KV scales": _survey(
        lambda found: "compressed-tensors" in found["methods"],
        f"{_COMPRESSED} CompressedTensorsConfig.get_quant_method",
        "read",
    ),
    "two KV scales of zero count as not loaded": _survey(
        lambda found: found["zeros"] != "refused",
        "srt/layers/quantization/kv_cache.py BaseKVCacheMethod.process_weights_after_loading",
        "run",
    ),
    "loaders of qwen3_5 map self_attn.k_scale": _survey(
        lambda found: found["models"]["qwen3_5_text"]["ours"] == "used",
        f"{_MODELS}qwen3_5.py Qwen3_5ForConditionalGeneration.load_weights",
        "run",
    ),
}
