"""KV scales of the tiny llama in the format of every tool, written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

K = (0.5, 2.0)
V = (0.75, 0.25)
JOINT = (0.75, 2.0)
"""The larger of k and v, layer by layer."""
HEADS = {"k": ((0.5, 0.125), (1.0, 2.0)), "v": ((0.25, 0.75), (0.25, 0.0625))}
"""Whose largest are `K` and `V`."""
ATTENTION = "model.layers.{}.self_attn"
CT_NUMBER = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}


def save_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> Path:
    """Write a checkpoint of one file, with a few FP8 weights that have no scale."""
    folder.mkdir()
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    weights = {f"{ATTENTION.format(i)}.o_proj.weight": weight.clone() for i in range(2)}
    save_file({**tensors, **weights}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def name_pairs(k: str = "k_scale", v: str = "v_scale") -> dict[str, torch.Tensor]:
    """Name the scales of k and v of both layers."""
    return {
        f"{ATTENTION.format(layer)}.{name}": torch.tensor(values[layer])
        for layer in range(2)
        for name, values in ((k, K), (v, V))
    }


def name_singles() -> dict[str, torch.Tensor]:
    """Name the one scale of both layers."""
    return {f"{ATTENTION.format(i)}.kv_scale": torch.tensor(JOINT[i]) for i in range(2)}


def save_compressed(folder: Path) -> Path:
    config = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {**CT_NUMBER, "strategy": "tensor"},
    }
    pairs = {name: value.to(torch.bfloat16).reshape(1) for name, value in name_pairs().items()}
    return save_checkpoint(folder, pairs, quantization_config=config)


def save_per_head(folder: Path) -> Path:
    config = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {**CT_NUMBER, "strategy": "attn_head"},
    }
    tensors = {
        f"{ATTENTION.format(layer)}.{role}_scale": torch.tensor(HEADS[role][layer]).reshape(2, 1, 1)
        for layer in range(2)
        for role in HEADS
    }
    return save_checkpoint(folder, tensors, quantization_config=config)


def save_autofp8(folder: Path) -> Path:
    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    return save_checkpoint(folder, name_pairs(), quantization_config=config)


def save_old_autofp8(folder: Path) -> Path:
    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    return save_checkpoint(folder, name_singles(), quantization_config=config)


def save_modelopt(folder: Path) -> Path:
    pairs = name_pairs("k_proj.k_scale", "v_proj.v_scale")
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return save_checkpoint(folder, pairs, quantization_config=config)


def save_quark(folder: Path) -> Path:
    pairs = name_pairs("k_proj.output_scale", "v_proj.output_scale")
    return save_checkpoint(folder, pairs, quantization_config={"quant_method": "quark"})


def save_tgi(folder: Path, dtype: str = "float8_e4m3fn") -> Path:
    return save_checkpoint(folder, name_singles(), kv_cache_torch_dtype=dtype)


def save_json(path: Path, ranks: Mapping[str, object], dtype: str | None = "float8_e4m3fn") -> Path:
    named = {} if dtype is None else {"dtype": dtype}
    kv_cache = {**named, "scaling_factor": ranks}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    return path


def save_vllm_json(path: Path) -> Path:
    return save_json(path, {"0": {"0": JOINT[0], "1": JOINT[1]}})


def save_rfc(path: Path) -> Path:
    return save_json(path, {"rank0": {"0": JOINT[0], "1": JOINT[1]}})


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
    save_file(name_pairs(), path)
    return path


SOURCES: Mapping[str, tuple[str, Callable[[Path], Path], bool]] = {
    "compressed-tensors": ("llama-FP8", save_compressed, False),
    "autofp8": ("llama-FP8", save_autofp8, False),
    "old autofp8": ("llama-FP8", save_old_autofp8, True),
    "modelopt": ("llama-FP8", save_modelopt, False),
    "quark": ("llama-FP8", save_quark, False),
    "tgi": ("llama-FP8", save_tgi, True),
    "vllm-json": ("scales.json", save_vllm_json, True),
    "rfc": ("scales.json", save_rfc, True),
}
"""Name of the file or folder, who writes it, and whether k and v are one. All have one scale a
layer and say what format it is for."""
