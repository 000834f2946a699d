"""Changed copies of a Llama whose function is the same."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.kit.checkpoints import change_config

_WIDTH = 128


def save_rescaled(source: Path, folder: Path, *, keys: float, values: float) -> Path:
    """Save a Llama whose keys and values are that much larger, as fp32.

    q_proj and o_proj take the factor back. RoPE turns a head's keys and queries alike, so one
    factor for all of them changes nothing; powers of two change no bit of the outputs either.
    """
    factors = {"k_proj": keys, "q_proj": 1 / keys, "v_proj": values, "o_proj": 1 / values}
    tensors = {
        name: weight.float() * factors.get(name.split(".")[-2], 1.0)
        for name, weight in load_file(source / "model.safetensors").items()
    }
    return _save(source, folder, tensors, {"dtype": "float32"})


def save_widened(source: Path, folder: Path) -> Path:
    """Save a Llama whose hidden size and heads are filled up with zeros to multiples of 128."""
    config = json.loads((source / "config.json").read_text())
    return _save(source, folder, *_widen(load_file(source / "model.safetensors"), config))


def _save(
    source: Path,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    changes: dict[str, object],
) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return change_config(folder, **changes)


def _widen(
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
