"""Names of vLLM's attention layers in vision towers; `real_engines` compares them with vLLM."""

from __future__ import annotations

import pytest

from fp8calib.engines.facts.release import VLLM_RELEASES
from fp8calib.engines.vllm.vision import list_vision_gpus, name_vision_layers
from fp8calib.errors import ExportError

OLDEST, NEWEST = VLLM_RELEASES[0], VLLM_RELEASES[-1]


@pytest.mark.parametrize(
    ("architecture", "module", "layer"),
    [
        (
            "Qwen2_5_VLForConditionalGeneration",
            "visual.blocks.0.attn",
            "visual.blocks.0.attn.attn",
        ),
        (
            "Qwen3VLForConditionalGeneration",
            "model.visual.blocks.11.attn",
            "visual.blocks.11.attn.attn",
        ),
        (
            "Qwen2_5OmniModel",
            "thinker.visual.blocks.3.attn",
            "visual.blocks.3.attn.attn",
        ),
    ],
)
def test_a_layer_is_named_without_what_is_before_the_tower(
    architecture: str, module: str, layer: str
) -> None:
    assert name_vision_layers([module], architecture, NEWEST) == {module: layer}


def test_a_class_whose_tower_is_not_run_in_fp8_is_refused() -> None:
    with pytest.raises(ExportError, match=r"vLLM 0\.33 does not run the vision tower of Llava"):
        name_vision_layers([], "LlavaForConditionalGeneration", NEWEST)


def test_a_class_of_a_later_release_is_refused() -> None:
    name = "InternS2MobiusForConditionalGeneration"

    assert name_vision_layers([], name, NEWEST) == {}
    with pytest.raises(ExportError, match=f"vLLM 0.26 does not run the vision tower of {name}"):
        name_vision_layers([], name, OLDEST)


def test_a_module_outside_the_tower_is_refused() -> None:
    with pytest.raises(ExportError, match=r"layers\.0\.self_attn is not in visual"):
        name_vision_layers(["model.layers.0.self_attn"], "Qwen3VLForConditionalGeneration", NEWEST)


def test_the_gpus_are_those_of_the_release() -> None:
    cuda = "CUDA from capability 10.0, with FlashInfer and cuDNN 9.17.1"

    assert list_vision_gpus(OLDEST) == (cuda,)
    assert list_vision_gpus(NEWEST) == (cuda, "MI300 and MI350, with AITER")
