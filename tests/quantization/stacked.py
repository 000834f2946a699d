"""Tiny models whose experts are stacked on disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.architectures.families import FAMILIES, SIZES
from tests.kit.minutes import in_minutes
from tests.zoo import ZOO

_FINE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_COARSE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ARIA: dict[str, Any] = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 16,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 128,
}
_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_LLAMA4_VISION = {
    **_VISION,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of a type, and how its checkpoints are published."""

    changes: dict[str, Any]
    """To the config of the text model."""
    vision: dict[str, Any] | None = None
    """The config of its vision tower; None for text models."""
    is_original: bool = True
    """`save_pretrained` writes the stacks; otherwise it is told to keep what is in memory."""
    is_turned: bool = False
    """Published files hold the stacks the other way round than transformers saves them."""

    def build(self, model_type: str) -> torch.nn.Module:
        """Build a random fp32 model in which every parameter matters."""
        torch.manual_seed(0)
        text = {**SIZES, **self.changes}
        if self.vision is None:
            config = AutoConfig.for_model(model_type, **text)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            config = AutoConfig.for_model(model_type, text_config=text, vision_config=self.vision)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.eval()  # type: ignore[no-any-return]

    def save(self, model: Any, folder: Path) -> Path:
        """Write a model in the layout in which its family is published."""
        model.save_pretrained(folder, save_original_format=self.is_original)
        if self.is_turned:
            file = folder / "model.safetensors"
            tensors = {
                name: value.transpose(1, 2).contiguous() if ".mlp.experts." in name else value
                for name, value in load_file(file).items()
            }
            save_file(tensors, file, {"format": "pt"})
        return folder


STACKED: dict[str, Family] = {
    "aria": Family(
        {"model_type": "aria_text", **_ARIA}, {"model_type": "idefics3_vision", **_VISION}
    ),
    "aria_text": Family(_ARIA),
    "gemma4_text": Family(_GEMMA4),
    "granitemoe": Family(_COARSE),
    "granitemoehybrid": Family(FAMILIES["granitemoehybrid"]),
    "granitemoe_swa": Family(_COARSE),
    "granitemoeshared": Family({**_COARSE, "shared_intermediate_size": 24}),
    "llama4": Family(FAMILIES["llama4_text"], _LLAMA4_VISION),
    "llama4_text": Family(FAMILIES["llama4_text"]),
    "qwen3_5_moe": Family(FAMILIES["qwen3_5_moe_text"], _QWEN_VISION, is_original=False),
    "qwen3_5_moe_text": Family(FAMILIES["qwen3_5_moe_text"], is_original=False),
    "qwen3_vl_moe": Family(
        {**_FINE, "head_dim": 16, "rope_parameters": _ROPE}, _QWEN_VISION, is_turned=True
    ),
    **{
        name: Family({**ZOO, **FAMILIES}[name], is_original=False)
        for name in (
            *("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe"),
            *("olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
        )
    },
}

FEW = {"aria_text", "deepseek_v3", "gemma4_text", "granitemoe", "llama4", "qwen3_vl_moe"}
EVERY = [*sorted(FEW), *in_minutes(*sorted(STACKED.keys() - FEW))]
"""As parameters of a test: one of each layout, and the others."""


def find_experts(model: Any) -> dict[str, Any]:
    """Find the modules that hold stacked experts, by path."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3
    }
