"""Checkpoints of several schemes in vLLM: it creates each linear with the scheme of its pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.quantization.plan import CalibratedScales
from tests import zoo
from tests.quantization.by_hand import run
from tests.real_engines.vllm_job import load_in_vllm

SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
STATIC, DYNAMIC, WEIGHTS, BLOCK = "fp8-static", "fp8-dynamic", "w8a16", "fp8-block"
LINEAR = {
    STATIC: "CompressedTensorsW8A8Fp8 tensor static",
    DYNAMIC: "CompressedTensorsW8A8Fp8 channel dynamic",
    WEIGHTS: "CompressedTensorsW8A16Fp8 channel dynamic",
    BLOCK: "CompressedTensorsW8A8Fp8 block dynamic",
}
EXPERTS = {scheme: text.replace("Fp8 ", "Fp8MoEMethod ") for scheme, text in LINEAR.items()}
PATTERNS: dict[str, dict[str, str]] = {
    "llama": {"*.down_proj": WEIGHTS, "*.layers.1.mlp": BLOCK, "*.o_proj": STATIC},
    "llama-parts": {"re:.*[.](q_proj|k_proj|v_proj)": WEIGHTS, "*.layers.0.mlp.down_proj": STATIC},
    "mixtral": {"*.layers.1.*.experts": BLOCK, "*.self_attn": WEIGHTS},
    "qwen3_moe": {"*.experts": STATIC, "*.o_proj": BLOCK},
}
EXPECTED: dict[str, dict[str, str]] = {
    "llama": {
        **{f"{i}.self_attn.qkv_proj": LINEAR[DYNAMIC] for i in (0, 1)},
        **{f"{i}.self_attn.o_proj": LINEAR[STATIC] for i in (0, 1)},
        **{f"{i}.mlp.down_proj": LINEAR[WEIGHTS] for i in (0, 1)},
        "0.mlp.gate_up_proj": LINEAR[DYNAMIC],
        "1.mlp.gate_up_proj": LINEAR[BLOCK],
    },
    "llama-parts": {
        **{f"{i}.self_attn.qkv_proj": LINEAR[WEIGHTS] for i in (0, 1)},
        **{f"{i}.self_attn.o_proj": LINEAR[DYNAMIC] for i in (0, 1)},
        **{f"{i}.mlp.gate_up_proj": LINEAR[DYNAMIC] for i in (0, 1)},
        "0.mlp.down_proj": LINEAR[STATIC],
        "1.mlp.down_proj": LINEAR[DYNAMIC],
    },
    "mixtral": {
        **{
            f"{i}.self_attn.{each}": LINEAR[WEIGHTS]
            for i in (0, 1)
            for each in ("qkv_proj", "o_proj")
        },
        "0.block_sparse_moe.experts.routed_experts": EXPERTS[DYNAMIC],
        "1.block_sparse_moe.experts.routed_experts": EXPERTS[BLOCK],
    },
    "qwen3_moe": {
        **{f"{i}.self_attn.qkv_proj": LINEAR[DYNAMIC] for i in (0, 1)},
        **{f"{i}.self_attn.o_proj": LINEAR[BLOCK] for i in (0, 1)},
        **{f"{i}.mlp.experts.routed_experts": EXPERTS[STATIC] for i in (0, 1)},
    },
}
"""By hand, by the names of vLLM's modules below `model.layers`."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixed")
    ones: Mapping[str, torch.Tensor] = defaultdict(lambda: torch.tensor(0.5))
    scales = CalibratedScales(inputs=ones, kv={})
    outs = {}
    for case, choice in PATTERNS.items():
        sizes = {"moe_intermediate_size": 128} if case == "qwen3_moe" else {}
        sizes |= {"intermediate_size": 384 if "llama" in case else 128}
        zoo.save(case.removesuffix("-parts"), folder / case, **SIZES, **sizes)
        out = folder / f"{case}-fp8"
        outs[case] = run(folder / case, out, DYNAMIC, scales=scales, layer_schemes=choice).out
    return outs


@pytest.fixture(scope="module")
def loaded(written: dict[str, Path]) -> dict[str, Tensors]:
    return load_in_vllm(written)


@pytest.mark.parametrize("case", PATTERNS)
def test_each_weight_has_the_scheme_of_its_pattern(loaded: dict[str, Tensors], case: str) -> None:
    found = {
        name.removeprefix("scheme.model.layers."): bytes(text.tolist()).decode()
        for name, text in loaded[case].items()
        if name.startswith("scheme.")
    }
    assert found == EXPECTED[case]


@pytest.mark.parametrize("case", ["llama", "llama-parts"])
def test_codes_and_scales_arrive(
    written: dict[str, Path], loaded: dict[str, Tensors], case: str
) -> None:
    stored = load_file(written[case] / "model.safetensors")
    for name in EXPECTED[case]:
        parent, _, last = f"model.layers.{name}".rpartition(".")
        members = [f"{parent}.{part}" for part in FUSED.get(last, (last,))]
        suffixes = {n.rpartition(".")[2] for n in stored if n.startswith(f"{members[0]}.")}
        for suffix in suffixes:
            raw = torch.cat([stored[f"{m}.{suffix}"].flatten().view(torch.uint8) for m in members])
            found = loaded[case][f"loaded.{parent}.{last}.{suffix}"]
            assert torch.equal(found.flatten().view(torch.uint8), raw), (name, suffix)
