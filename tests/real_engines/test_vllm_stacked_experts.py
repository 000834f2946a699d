"""Experts taken out of stacks, in the stacks that vLLM loads them into.

The vision-language families want torchvision, which vLLM's environment lacks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.quantization.by_hand import run
from tests.quantization.stacked import STACKED
from tests.real_engines.vllm_job import load_in_vllm

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 128, "vocab_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text": ("", {"head_dim": 64, "global_head_dim": 64, "moe_intermediate_size": 128}),
    "granitemoe": ("block_sparse_moe.", {}),
    "granitemoehybrid": (
        "block_sparse_moe.",
        {"mamba_d_head": 64, "shared_intermediate_size": 128},
    ),
    "granitemoe_swa": ("block_sparse_moe.", {}),
    "granitemoeshared": ("block_sparse_moe.", {"shared_intermediate_size": 128}),
    "llama4_text": ("feed_forward.", {"head_dim": 64, "intermediate_size_mlp": 128}),
}
"""Where experts lie in a layer, and what makes the model large enough for vLLM."""
CASES = [
    *((family, "fp8-dynamic") for family in FAMILIES),
    *((family, "fp8-block") for family in ("gemma4_text", "granitemoe", "llama4_text")),
]
IGNORED = {
    ("llama4_text", "fp8-block"): ("*.self_attn.[qkv]_proj",),
    ("llama4_text", "fp8-dynamic"): ("*.0.feed_forward.experts",),
}
"""vLLM reorders q and k at load, which blocks do not survive (`fp8calib.engines.weights.rules`).
The experts of single layers may stay unquantized."""
Case = tuple[str, str]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """Quantize every family."""
    outs = {}
    for name, (_, changes) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        family = STACKED[name]
        family = replace(family, changes={**family.changes, **SIZES, **changes})
        family.save(family.build(name), folder / "model")
        for scheme in (scheme for family_name, scheme in CASES if family_name == name):
            ignored = IGNORED.get((name, scheme), ())
            run(folder / "model", folder / scheme, scheme, ignore=ignored)
            outs[name, scheme] = folder / scheme
    return outs


@pytest.fixture(scope="module")
def loaded(written: dict[Case, Path]) -> dict[Case, dict[str, torch.Tensor]]:
    """Let vLLM load them all, and give its parameters."""
    return load_in_vllm(written)


def as_loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Round what is not quantized to the dtype that vLLM is told to use."""
    is_weight = tensor.dtype is torch.float32 and tensor.numel() >= 128 * 128
    return tensor.bfloat16() if is_weight else tensor


@pytest.mark.parametrize("case", CASES)
def test_every_expert_lies_in_its_place(
    written: dict[Case, Path], loaded: dict[Case, dict[str, torch.Tensor]], case: Case
) -> None:
    """Codes and scales, as bytes: gate above up, one expert after another."""
    stored = load_file(written[case] / "model.safetensors")
    for layer in (0, 1):
        path = f"model.layers.{layer}.{FAMILIES[case[0]][0]}experts"
        for fused, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            first = f"{path}.0.{parts[0]}."
            suffixes = {name.removeprefix(first) for name in stored if name.startswith(first)}
            assert "weight" in suffixes
            for suffix in suffixes:
                found = loaded[case][f"loaded.{path}.routed_experts.{fused}_{suffix}"]
                names = [f"{path}.{e}.{part}.{suffix}" for e in range(4) for part in parts]
                values = [as_loaded(stored[name]).reshape(-1) for name in names]
                raw = torch.cat([value.view(torch.uint8) for value in values])
                assert torch.equal(found.reshape(-1).view(torch.uint8), raw), (fused, suffix)
