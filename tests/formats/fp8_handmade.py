"""FP8 checkpoints made by hand: codes and scales are typed, configs are those of the tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

LINEAR = "model.layers.0.self_attn.o_proj"
CODES = ((0x38, 0xC0, 0x01, 0x00), (0x3C, 0x7E, 0xB8, 0x08))
"""Of an e4m3fn weight [2, 4]."""
VALUES = [[1.0, -2.0, 2.0**-9, 0.0], [1.5, 448.0, -1.0, 2.0**-6]]


def quantizer(**changes: object) -> dict[str, object]:
    """Describe a quantizer as compressed-tensors 0.19 does: all keys, most of them null."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "static_minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    } | changes


PER_TOKEN = quantizer(dynamic=True, strategy="token", observer=None)
PER_GROUP = quantizer(dynamic=True, strategy="group", group_size=128, observer=None)


def group(
    weights: Mapping[str, object], inputs: Mapping[str, object] | None, *targets: str
) -> dict[str, object]:
    """Describe a group of linears as compressed-tensors does."""
    return {
        "format": "float-quantized",
        "targets": list(targets or ("Linear",)),
        "output_activations": None,
        "input_activations": inputs,
        "weights": weights,
    }


def compressed_tensors(*groups: Mapping[str, object], **changes: object) -> dict[str, object]:
    """Write a config as LLM Compressor does."""
    return {
        "config_groups": {f"group_{index}": item for index, item in enumerate(groups)},
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    } | changes


CT_STATIC = compressed_tensors(group(quantizer(), quantizer()))
CT_CHANNEL = compressed_tensors(group(quantizer(strategy="channel"), PER_TOKEN))
CT_BLOCK = compressed_tensors(
    group(quantizer(strategy="block", block_structure=[128, 128]), PER_GROUP)
)
AUTOFP8_STATIC: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
}
AUTOFP8_DYNAMIC = AUTOFP8_STATIC | {"activation_scheme": "dynamic"}
FINEGRAINED: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_MODELOPT_QUANTIZER = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT: dict[str, object] = {
    "config_groups": {
        "group_0": {
            "input_activations": _MODELOPT_QUANTIZER,
            "weights": _MODELOPT_QUANTIZER,
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
    "quant_algo": "FP8",
    "kv_cache_scheme": _MODELOPT_QUANTIZER,
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
FBGEMM: dict[str, object] = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head"],
}

AUTO_ROUND: dict[str, object] = {
    "act_bits": 8,
    "act_data_type": "fp",
    "act_dynamic": False,
    "act_group_size": 0,
    "act_sym": True,
    "activation_scheme": "static",
    "bits": 8,
    "block_name_to_quantize": "model.layers",
    "data_type": "fp",
    "fmt": "e4m3",
    "group_size": -1,
    "packing_format": "auto_round:fp8_static",
    "quant_method": "auto-round",
    "sym": True,
}
"""What auto-round 0.16.1 writes with `--scheme FP8_STATIC --format auto_round`."""
AUTO_ROUND_BLOCK = AUTO_ROUND | {
    "act_dynamic": True,
    "act_group_size": 128,
    "activation_scheme": "dynamic",
    "group_size": [128, 128],
    "packing_format": "auto_round:fp8",
}
AUTO_ROUND_MX = AUTO_ROUND | {
    "act_data_type": "mx_fp",
    "act_dynamic": True,
    "act_group_size": 32,
    "data_type": "mx_fp",
    "group_size": 32,
    "packing_format": "auto_round:llm_compressor",
}
AUTO_ROUND_ALONE: dict[str, object] = {
    "bits": 8,
    "data_type": "fp",
    "fmt": "e4m3",
    "group_size": 0,
    "quant_method": "auto-round",
    "sym": True,
}
"""With `--scheme FPW8A16`."""


def modelopt(algorithm: str) -> dict[str, object]:
    """Write ModelOpt's config of an algorithm that has no groups."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def quark(inputs: object = "static", **changes: object) -> dict[str, object]:
    """Write Quark's config; `inputs` is a spec of activations, or None."""
    spec = {
        "dtype": "fp8_e4m3",
        "is_dynamic": False,
        "qscheme": "per_tensor",
        "ch_axis": None,
        "group_size": None,
        "symmetric": True,
        "observer_cls": "PerTensorMinMaxObserver",
        "scale_type": "float",
    }
    rule = {
        "input_tensors": spec if inputs == "static" else inputs,
        "output_tensors": None,
        "weight": spec,
        "bias": None,
    }
    return {
        "global_quant_config": rule,
        "exclude": ["lm_head"],
        "algo_config": None,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "quant_mode": "eager_mode",
        "export": {"kv_cache_group": [], "weight_format": "real_quantized"},
    } | changes


def codes(rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Make a weight from its codes."""
    return torch.tensor(rows, dtype=torch.uint8).view(dtype)


def scalar(value: float) -> torch.Tensor:
    """Make a scale: fp32, 0-dim."""
    return torch.tensor(value, dtype=torch.float32)


def linear(
    module: str = LINEAR,
    *,
    scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> Tensors:
    """Make the tensors of an FP8 linear."""
    tensors = {f"{module}.weight": codes(CODES) if weight is None else weight}
    if scale is not None:
        tensors[f"{module}.weight_scale"] = scale
    if input_scale is not None:
        tensors[f"{module}.input_scale"] = input_scale
    return tensors


def save(folder: Path, tensors: Tensors, config: object) -> Path:
    """Write a checkpoint of one file; with `config` None it has no quantization config."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensors[name].clone() for name in tensors}, folder / "model.safetensors")
    document: dict[str, object] = {"model_type": "llama"}
    if config is not None:
        document["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(document))
    return folder
