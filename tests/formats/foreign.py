"""Files that real tools wrote for tiny models (`scripts/regenerate-fixtures`)."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry

FOLDER = Path(__file__).parents[1] / "foreign"
LLAMA_ATTENTION = "model.layers.{}.self_attn"
GPT2_ATTENTION = "transformer.h.{}.attn"

KV_SCALES: Mapping[str, tuple[str, str, str, str]] = {
    "llmcompressor-fp8-static-kv": ("llama", "compressed-tensors", "k_scale", "v_scale"),
    "llmcompressor-kv": ("llama", "compressed-tensors", "k_scale", "v_scale"),
    "llmcompressor-kv-head": ("llama", "compressed-tensors", "k_scale", "v_scale"),
    "llmcompressor-attention-head": ("llama", "compressed-tensors", "k_scale", "v_scale"),
    "llmcompressor-mixtral-fp8-static-kv": ("mixtral", "compressed-tensors", "k_scale", "v_scale"),
    "modelopt-fp8-kv": ("llama", "modelopt", "k_proj.k_scale", "v_proj.v_scale"),
    "modelopt-fp8-channel-kv": ("llama", "modelopt", "k_proj.k_scale", "v_proj.v_scale"),
    "modelopt-kv": ("llama", "modelopt", "k_proj.k_scale", "v_proj.v_scale"),
    "modelopt-mixtral-fp8-kv": ("mixtral", "modelopt", "k_proj.k_scale", "v_proj.v_scale"),
    "modelopt-gpt2-kv": ("gpt2", "modelopt", "k_proj.k_scale", "v_proj.v_scale"),
    "quark-fp8-kv": ("llama", "quark", "k_proj.output_scale", "v_proj.output_scale"),
    "quark-mixtral-fp8-kv": ("mixtral", "quark", "k_proj.output_scale", "v_proj.output_scale"),
    "quark-autofp8-kv": ("llama", "autofp8", "k_scale", "v_scale"),
}
"""By folder: the model, the dialect, and how the tool calls k and v under the attention."""
NO_KV_SCALES: Mapping[str, str] = {
    "llmcompressor-fp8-dynamic": "llama",
    "llmcompressor-fp8-block": "llama",
    "llmcompressor-w8a16": "llama",
    "llmcompressor-fp8-static-float32": "llama",
    "llmcompressor-fp8-dynamic-float32": "llama",
    "llmcompressor-fp8-block-float32": "llama",
    "modelopt-fp8-float32": "llama",
    "llmcompressor-mxfp8": "llama",
    "llmcompressor-mxfp8-a16": "llama",
    "modelopt-mxfp8": "llama",
    "llmcompressor-gpt2-kv": "gpt2",
}
"""The model of each folder. The config of the last one claims KV scales."""


@cache
def find_geometry(model: str) -> ModelGeometry:
    """Find the geometry of one of the models from which the tools made the files."""
    folder = FOLDER / model
    return read_geometry(folder, json.loads((folder / "config.json").read_text()))


def load_tensors(name: str) -> dict[str, torch.Tensor]:
    """Load everything a tool stored, without our reader."""
    return load_file(FOLDER / name / "model.safetensors")


def load_kv_scales(name: str) -> list[tuple[list[float], list[float]]]:
    """Load the stored k and v scales of both layers, without our reader."""
    model, _, k, v = KV_SCALES[name]
    attention = GPT2_ATTENTION if model == "gpt2" else LLAMA_ATTENTION
    tensors = load_tensors(name)
    paths = [attention.format(index) for index in range(2)]
    return [
        (
            tensors[f"{path}.{k}"].double().flatten().tolist(),
            tensors[f"{path}.{v}"].double().flatten().tolist(),
        )
        for path in paths
    ]
