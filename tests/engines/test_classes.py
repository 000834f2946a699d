"""What the model classes of engines create, as the files of facts have it."""

from __future__ import annotations

import pytest

from fp8calib.engines.facts.classes import (
    CreatedLinear,
    find_class_map,
    list_versions,
    make_pattern,
)
from fp8calib.engines.facts.release import SGLANG_RELEASES, VLLM_RELEASES

FACTS = {
    "config linear model.layers.*.mlp.down_proj": CreatedLinear(
        state="config",
        kind="linear",
        path="model.layers.*.mlp.down_proj",
        parts=("model.layers.*.mlp.down_proj",),
    ),
    "joined linear h.*.attn.qkv_proj: .q_proj .k_proj": CreatedLinear(
        state="joined",
        kind="linear",
        path="h.*.attn.qkv_proj",
        parts=("h.*.attn.q_proj", "h.*.attn.k_proj"),
    ),
    "plain linear model.layers.*.router: model.layers.*.mlp.gate": CreatedLinear(
        state="plain",
        kind="linear",
        path="model.layers.*.router",
        parts=("model.layers.*.mlp.gate",),
    ),
    "config head lm_head: embed_out": CreatedLinear(
        state="config", kind="head", path="lm_head", parts=("embed_out",)
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_read_and_written(fact: str) -> None:
    assert CreatedLinear.parse(fact) == FACTS[fact]
    assert FACTS[fact].fact == fact


def test_numbers_in_paths_become_stars() -> None:
    assert make_pattern("model.layers.10.mlp.experts.3.w1") == "model.layers.*.mlp.experts.*.w1"
    assert make_pattern("altup_projections.2") == "altup_projections.*"


def test_all_known_releases_have_a_map() -> None:
    assert list_versions("vllm") == [each.version for each in VLLM_RELEASES]
    assert list_versions("sglang") == [each.version for each in SGLANG_RELEASES]


CREATED = [
    ("Qwen3_5ForCausalLM", "model.layers.*.linear_attn.in_proj_z", "config", "in_proj_qkvz"),
    ("Qwen3_5ForCausalLM", "model.layers.*.linear_attn.conv1d", "plain", "conv1d"),
    ("MixtralForCausalLM", "model.layers.*.block_sparse_moe.gate", "plain", "gate"),
    ("MixtralForCausalLM", "model.layers.*.block_sparse_moe.experts.*.w3", "config", "experts"),
    ("GPTJForCausalLM", "transformer.h.*.attn.q_proj", "joined", "qkv_proj"),
    ("Qwen3MoeForCausalLM", "model.layers.*.mlp.up_proj", "joined", "gate_up_proj"),
    ("BioGptForCausalLM", "biogpt.layers.*.self_attn.q_proj", "config", "q_proj"),
    ("FalconH1ForCausalLM", "model.layers.*.mamba.in_proj", "config", "in_proj"),
    ("Gemma2ForCausalLM", "lm_head", "refused", "lm_head"),
    ("JambaForCausalLM", "model.layers.*.mamba.x_proj", "plain", "x_proj"),
    ("Qwen3NextForCausalLM", "mtp.fc", "config", "fc"),
    ("DeepseekV3ForCausalLM", "model.layers.*.eh_proj", "plain", "eh_proj"),
    ("Ernie4_5_MoeForCausalLM", "model.mtp_linear_proj.*", "plain", "mtp_linear_proj"),
]


@pytest.mark.parametrize(("architecture", "path", "state", "own"), CREATED)
def test_vllm_creates_what_was_seen(architecture: str, path: str, state: str, own: str) -> None:
    classes = find_class_map("vllm", "0.32.0", architecture)
    assert classes is not None
    assert {(each.state, each.path.rpartition(".")[2]) for each in classes[path]} == {(state, own)}


def test_a_class_that_does_not_build_has_no_map() -> None:
    assert find_class_map("vllm", "0.32.0", "BambaForCausalLM") is None
    assert find_class_map("vllm", "0.5.0", "LlamaForCausalLM") is None
