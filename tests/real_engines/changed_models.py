"""Write a changed copy of a Llama.

python -m tests.real_engines.changed_models MODEL HOW OUT

off-grid: weights moved off the 4-bit grid they are on, by noise of one step.
rescaled: keys 64 times as large and values a 1024th; the function is the same.
widened: hidden size and heads filled up with zeros to multiples of 128; the function is the same.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_GROUP = 32
"""Weights of the demo's file format that share a 4-bit grid."""
_STEPS = 15
_WIDTH = 128
_FACTORS = {"k_proj": 64.0, "q_proj": 1 / 64, "v_proj": 1 / 1024, "o_proj": 1024.0}
"""RoPE turns keys and queries alike, and powers of two change no bit of the outputs."""


def main(model: Path, how: str, out: Path) -> None:
    """Copy the folder with changed weights."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    if how == "off-grid":
        torch.manual_seed(0)
        tensors = {name: move(value) for name, value in tensors.items()}
    elif how == "rescaled":
        tensors = {
            name: value * _FACTORS.get(name.split(".")[-2], 1.0) for name, value in tensors.items()
        }
    else:
        config = json.loads((out / "config.json").read_text())
        tensors, changes = widen(tensors, config)
        (out / "config.json").write_text(json.dumps({**config, **changes}, indent=2))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def move(weight: torch.Tensor) -> torch.Tensor:
    """Add uniform noise of one grid step, (max - min) / 15 over each 32 weights."""
    if weight.dim() != 2 or weight.shape[1] % _GROUP:
        return weight
    groups = weight.float().view(weight.shape[0], -1, _GROUP)
    step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / _STEPS
    moved = groups + (torch.rand_like(groups) - 0.5) * step
    return moved.view_as(weight).to(weight.dtype)


def widen(
    tensors: dict[str, torch.Tensor], config: dict[str, object]
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Fill up a Llama with zeros: hidden channels, and whole groups of heads of zeros."""
    hidden, heads, kv_heads = (
        int(str(config[name]))
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head = hidden // heads
    groups = kv_heads
    while groups * head % _WIDTH or groups * (heads // kv_heads) * head % _WIDTH:
        groups += 1
    wide = groups * (heads // kv_heads) * head  # transformers wants a multiple of the heads
    sizes = {"q_proj": wide}
    sizes |= dict.fromkeys(("k_proj", "v_proj"), groups * head)
    found = {}
    for name, value in tensors.items():
        kind = name.split(".")[-2]
        if kind.endswith("norm"):  # the mean of squares is over more channels now
            padded = torch.zeros(wide, dtype=torch.float32)
            padded[:hidden] = value.float() * (hidden / wide) ** 0.5
        else:
            rows, columns = value.shape
            rows = sizes.get(kind, wide if rows == hidden else rows)
            columns = wide if columns == hidden else columns
            padded = torch.zeros(rows, columns, dtype=torch.float32)
            padded[: value.shape[0], : value.shape[1]] = value.float()
        found[name] = padded.to(torch.float32 if kind.endswith("norm") else value.dtype)
    epsilon = float(str(config["rms_norm_eps"])) * hidden / wide
    changes: dict[str, object] = {
        "hidden_size": wide,
        "num_attention_heads": groups * (heads // kv_heads),
        "num_key_value_heads": groups,
        "head_dim": head,
        "rms_norm_eps": epsilon,
    }
    return found, changes


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
