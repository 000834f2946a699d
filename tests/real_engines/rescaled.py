"""Checkpoints rescaled inside attention: the same function, other magnitudes in the KV cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save_rescaled(source: Path, folder: Path, *, keys: float, values: float) -> Path:
    """Save a Llama whose keys and values are that much larger, as fp32.

    q_proj and o_proj take the factor back. RoPE turns a head's keys and queries alike, so one
    factor for all of them changes nothing; powers of two change no bit of the outputs either.
    """
    factors = {"k_proj": keys, "q_proj": 1 / keys, "v_proj": values, "o_proj": 1 / values}
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        for name, weight in load_file(path).items():
            tensors[name] = weight.float() * factors.get(name.split(".")[-2], 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder
