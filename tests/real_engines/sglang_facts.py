"""What `scripts/read-engines` reads of a release of SGLang.

Its models are opened by a process for each release, since what it opens is kept
(`sglang_sources.py`): `python -m tests.real_engines.sglang_facts NAME` prints one fact.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
from tests.real_engines.sglang_sources import (
    REQUIREMENT,
    gives_scales_a_place,
    list_entries,
    list_models_with_scales,
)
from tests.real_engines.sglang_survey import (
    MODELS,
    OTHERS,
    WRAPPERS,
    gives_parameters,
    hold_zeros,
    survey,
)
from tests.real_engines.type_facts import Probe, read_auto_round, read_demanded, read_own_types
from tests.real_engines.vllm_sources import take

ROOT = Path(__file__).parents[2]
_O = f"{LAYER}.self_attn.o_proj"
_COMPRESSED = "compressed_tensors/compressed_tensors.py"
_CONFIG = "srt/configs/model_config.py"
_MODELS = "srt/models/"
_FAILING_LOADERS = (
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
)
"""Classes whose `load_kv_cache_scales` always fails: Llama 4's inner model has none, HunYuan's
attention no `kv_scale`."""
_OTHER_TYPES = {
    "glm5_next": "Glm5NextForConditionalGeneration",
    "mimo": "MiMoForCausalLM",
    "mimo_v2": "MiMoV2ForCausalLM",
}
"""Model types with a file of scales that transformers has no text class of."""


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


def list_placeless() -> Iterable[str]:
    """List the model types whose attention is created without the quantization config."""
    texts = {text_type: architecture for architecture, text_type, _ in WRAPPERS.values()}
    for model_type, architecture in sorted((texts | _list_types()).items()):
        if architecture in list_entries() and gives_scales_a_place(architecture) is False:
            yield model_type


def _list_types() -> dict[str, str]:
    """Name the class of model types."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | _OTHER_TYPES | OTHERS | MODELS


def list_types_with_files() -> Iterable[str]:
    """List the model types whose class reads a file of scales."""
    classes = list_models_with_scales().difference(_FAILING_LOADERS)
    return sorted(each for each, name in _list_types().items() if name in classes)


_FACTS: Mapping[str, tuple[Callable[[], Iterable[str] | bool], str, Evidence]] = {
    "attention of this model type has no parameters for KV scales": (
        list_placeless,
        f"{_MODELS} RadixAttention",
        Evidence.READ,
    ),
    "class of this model type reads a file of scales": (
        list_types_with_files,
        f"{_MODELS} load_kv_cache_scales",
        Evidence.READ,
    ),
    "compressed-tensors' attention has parameters for KV scales": (
        lambda: gives_parameters("compressed-tensors"),
        f"{_COMPRESSED} CompressedTensorsConfig.get_quant_method",
        Evidence.READ,
    ),
    "two KV scales of zero count as not loaded": (
        lambda: hold_zeros() != "refused",
        "srt/layers/quantization/kv_cache.py BaseKVCacheMethod.process_weights_after_loading",
        Evidence.RUN,
    ),
    "loaders of qwen3_5 map self_attn.k_scale": (
        lambda: survey("qwen3_5_text")["ours"] == "used",
        f"{_MODELS}qwen3_5.py Qwen3_5ForConditionalGeneration.load_weights",
        Evidence.RUN,
    ),
}
"""What is asked of the models: in which way, where in the sources, and how it is known."""


@cache
def _read_models(package: Package) -> Mapping[str, list[str] | bool]:
    """Ask a process of its own for all of them."""
    command = [sys.executable, "-m", "tests.real_engines.sglang_facts"]
    environment = {**os.environ, REQUIREMENT: package.requirement, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: Mapping[str, list[str] | bool] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print as JSON what the models of a release do."""
    with redirect_stdout(sys.stderr):  # some loaders print
        asked = ((name, ask()) for name, (ask, _, _) in _FACTS.items())
        found = {name: value if isinstance(value, bool) else [*value] for name, value in asked}
    json.dump(found, sys.stdout)


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
    DEMANDED: Probe(read=read_demanded, source="Requires-Dist of the wheel", how=Evidence.READ),
    OWN_TYPES: Probe(
        read=read_own_types("srt/configs/", "srt/utils/hf_transformers"),
        source="srt/configs/ model_type; srt/utils/hf_transformers/common.py _CONFIG_REGISTRY",
        how=Evidence.READ,
    ),
    "--kv-cache-dtype": Probe(
        read=read_cache_types, source=" ".join(_ARGUMENTS), how=Evidence.READ
    ),
    ACCEPTED: Probe(
        read=read_auto_round,
        source="srt/layers/quantization/auto_round.py AutoRoundConfig",
        how=Evidence.READ,
    ),
    "class": Probe(
        read=lambda package: sorted(list_entries(package)),
        source=f"{_MODELS} EntryClass",
        how=Evidence.READ,
        is_difference=True,
    ),
    "the format of a config group is read": Probe(
        read=reads_group_formats,
        source=f"{_COMPRESSED} CompressedTensorsConfig.from_config",
        how=Evidence.RUN,
    ),
    "FP8 weights alone, per channel, are not taken for packed integers": Probe(
        read=takes_channels_alone,
        source=f"{_COMPRESSED} CompressedTensorsConfig.get_linear_scheme",
        how=Evidence.RUN,
    ),
    "an entry of ignore matches the end of a path, and no part of it in either case": Probe(
        read=matches_ends,
        source="compressed_tensors/utils.py should_ignore_layer",
        how=Evidence.RUN,
    ),
    "compressed-tensors quantizes the output layer": Probe(
        read=quantizes_head, source=_CHOICE, how=Evidence.RUN
    ),
    "MXFP8 is loaded as MXFP8": Probe(
        read=read_mx,
        source=f"{_CONFIG} ModelConfig._parse_modelopt_quant_config; fp8.py Fp8Config; {_CHOICE}",
        how=Evidence.RUN,
    ),
    **{
        f"mixed precision {what}": Probe(
            read=lambda package, path=path: read_mixed(package, path),
            source="modelopt_quant.py ModelOptMixedPrecisionConfig.get_quant_method",
            how=Evidence.RUN,
        )
        for what, path in (("linear", _O), ("expert", f"{LAYER}.mlp.experts"))
    },
    **{
        name: Probe(
            read=lambda package, name=name: _read_models(package)[name],
            source=source,
            how=how,
        )
        for name, (_, source, how) in _FACTS.items()
    },
}


if __name__ == "__main__":
    main()
