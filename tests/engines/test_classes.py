"""What the model classes of engines create, as the files of facts have it."""

import pytest

from fp8calib.engines.facts.classes import CreatedLinear, read_class_facts
from fp8calib.engines.facts.release import SGLANG_RELEASES, VLLM_RELEASES
from tests.kit.class_facts import spell_fact

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
    assert spell_fact(FACTS[fact]) == fact


def test_all_known_releases_have_a_map() -> None:
    assert list(read_class_facts("vllm")) == [each.version for each in VLLM_RELEASES]
    assert list(read_class_facts("sglang")) == [each.version for each in SGLANG_RELEASES]
