"""Models and statistics with the same bits on every processor: integers, divided by powers of two.

Random floats differ between processors (AVX2, AVX-512), random integers do not.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

import fp8calib
from tests import zoo
from tests.architectures.families import FAMILIES, SIZES

EVERY_FAMILY = tuple(sorted(zoo.ZOO | FAMILIES))
KINDS = {
    "llama": "dense, GQA",
    "gpt_bigcode": "MQA",
    "opt": "biases, MHA",
    "deepseek_v3": "MLA",
    "mixtral": "separate experts on disk",
    "gpt_oss": "stacked experts, sinks",
    "qwen3_moe": "experts of two sizes",
    "gpt2": "Conv1D",
    "gemma2": "tied, sliding",
    "gemma3n_text": "shared KV",
    "qwen3_next": "hybrid",
    "phi3": "fused on disk",
    "falcon": "custom names, fused by group",
    "bloom": "ALiBi",
    "dbrx": "names of its own, experts as one matrix",
    "lfm2_moe": "convolutions",
}
"""The families that go through every scheme, format and `verify`, each for a kind."""
OF_THEIR_OWN = frozenset(
    (
        *("biogpt", "cohere", "falcon_h1", "gemma4_text", "glm4_moe_lite", "gpt_neox", "gptj"),
        *("granitemoehybrid", "jamba", "kimi_linear", "llama4_text", "mpt", "nemotron_h", "olmoe"),
        *("persimmon", "phimoe", "qwen3_5_moe_text", "recurrent_gemma", "stablelm", "xglm"),
    )
)
"""Families with layers, names or layouts that no kind has; all others are recorded in minutes."""


def fill(model: nn.Module) -> None:
    """Fill a model's parameters with multiples of 1/256 from -1/4 to 1/4; norms are around 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            values = torch.randint(-64, 65, parameter.shape, generator=generator) / 256
            parameter.copy_(values + 1 if "norm" in name and parameter.dim() == 1 else values)


def _widen(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give the sizes of MLPs that are not multiples of 32, which MXFP8 needs, as multiples."""
    wider = {48: 64, 24: 32}
    return {
        key: _widen(value) if isinstance(value, dict) else wider.get(value, value)
        for key, value in config.items()
        if isinstance(value, dict) or (type(value) is int and value in wider)
    }


def save(family: str, folder: Path) -> None:
    """Write a model of a family with such parameters."""
    config = {**SIZES, **(zoo.ZOO | FAMILIES)[family]}
    changes = _widen(config) if family in KINDS else {}
    if family == "dbrx":
        changes = {"ffn_config": config["ffn_config"] | changes["ffn_config"]}
    model = zoo.build(family, **changes)
    fill(model)
    model.save_pretrained(folder)


def write_text(path: Path) -> Path:
    """Write rows of token ids."""
    rows = zoo.draw([20] * 9, seed=5)
    path.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows))
    return path


def make_magnitudes(key: str, like: torch.Tensor) -> torch.Tensor:
    """Make magnitudes (1 + k/64) * 2**e, k < 64 and -6 <= e < 2, of a tensor's name and places."""
    codes = [crc32(f"{key}/{place}".encode()) for place in range(like.numel())]
    values = [(1 + code % 64 / 64) * 2.0 ** ((code >> 8) % 8 - 6) for code in codes]
    return torch.tensor(values, dtype=torch.float32).view_as(like)


def make_amax(stats_path: Path) -> Mapping[str, torch.Tensor]:
    """Make the amax of K, V, q and inputs of a stats file; weights have exact ones already.

    Linears with one input share a site's values: their path without the last name makes them.
    """
    return dict(_list_made(fp8calib.load_stats(stats_path)))


def _list_made(stats: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for site, seen in stats.sites.items():
        if site.role == "weight" or not seen.count:
            continue
        parent, _, name = site.module.rpartition(".")
        is_shared = name in {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
        key = f"{parent if is_shared else site.module}.{site.role}"
        amax = make_magnitudes(key, seen.amax)
        yield f"{site}/amax", amax
        if seen.experts is not None:
            yield f"{site}/experts", make_magnitudes(f"{key}/experts", seen.experts)
