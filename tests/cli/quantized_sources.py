"""KV scales of the tiny llama in the format of every tool, written by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

K, V = (0.5, 2.0), (0.75, 0.25)
JOINT = (0.75, 2.0)
"""The larger of k and v, layer by layer."""
HEADS = {"k": ((0.5, 0.125), (1.0, 2.0)), "v": ((0.25, 0.75), (0.25, 0.0625))}
"""Whose largest are `K` and `V`."""
ATTENTION = "model.layers.{}.self_attn"
PAIR = ("k_scale", "v_scale")
CT_NUMBER = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
CT = {"quant_method": "compressed-tensors", "kv_cache_scheme": CT_NUMBER | {"strategy": "tensor"}}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
CHECKPOINTS: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "compressed-tensors": (PAIR, {"quantization_config": CT}),
    "autofp8": (PAIR, {"quantization_config": FP8}),
    "old autofp8": (("kv_scale",), {"quantization_config": FP8}),
    "modelopt": (
        ("k_proj.k_scale", "v_proj.v_scale"),
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    ),
    "quark": (
        ("k_proj.output_scale", "v_proj.output_scale"),
        {"quantization_config": {"quant_method": "quark"}},
    ),
    "tgi": (("kv_scale",), {"kv_cache_torch_dtype": "float8_e4m3fn"}),
}
"""The names of k and v, or of both, and the config."""
RANK_KEYS = {"vllm-json": "0", "rfc": "rank0"}
SOURCES = {
    **dict.fromkeys(CHECKPOINTS, "llama-FP8"),
    **dict.fromkeys(RANK_KEYS, "scales.json"),
}
"""Name of the file or folder. All have one scale a layer and say what format it is for."""


def name_scales(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Name the scales of k and v of both layers, or the one of both."""
    columns = (JOINT,) if len(names) == 1 else (K, V)
    return {
        f"{ATTENTION.format(layer)}.{name}": torch.tensor(values[layer])
        for layer in range(2)
        for name, values in zip(names, columns, strict=True)
    }


def save_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> Path:
    """Write a checkpoint of one file, with a few FP8 weights that have no scale."""
    folder.mkdir()
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    weights = {f"{ATTENTION.format(i)}.o_proj.weight": weight.clone() for i in range(2)}
    save_file({**tensors, **weights}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def save_source(name: str, path: Path) -> Path:
    if name in RANK_KEYS:
        factors = {RANK_KEYS[name]: {"0": JOINT[0], "1": JOINT[1]}}
        kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
        path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
        return path
    names, config = CHECKPOINTS[name]
    scales = name_scales(names)
    if name == "compressed-tensors":
        scales = {key: scale.to(torch.bfloat16).reshape(1) for key, scale in scales.items()}
    return save_checkpoint(path, scales, **config)


def save_per_head(folder: Path) -> Path:
    scheme = CT_NUMBER | {"strategy": "attn_head"}
    tensors = {
        f"{ATTENTION.format(layer)}.{role}_scale": torch.tensor(HEADS[role][layer]).reshape(2, 1, 1)
        for layer in range(2)
        for role in HEADS
    }
    return save_checkpoint(folder, tensors, quantization_config={**CT, "kv_cache_scheme": scheme})


def save_ranks(folder: Path) -> Path:
    """Write two rank files as TensorRT-LLM does, with a config that states FP8."""
    folder.mkdir()
    for rank, values in enumerate(((0.75, 1.0), (0.25, 2.0))):
        tensors = {
            f"transformer.layers.{layer}.attention.kv_cache_scaling_factor": torch.tensor([value])
            for layer, value in enumerate(values)
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
    config = {"mapping": {"tp_size": 2}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_npz(path: Path) -> Path:
    """Write a rank file as AMMO does, without a config."""
    arrays = {
        f"_np:layers:{layer}.{layer}.kv_cache_scaling_factor": np.array([value], dtype=np.float32)
        for layer, value in enumerate(JOINT)
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def save_bare(path: Path) -> Path:
    save_file(name_scales(PAIR), path)
    return path
