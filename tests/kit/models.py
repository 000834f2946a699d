"""Tiny models that `zoo` does not have."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def build_gemma3(**changes: Any) -> PreTrainedModel:
    """Build a random gemma3 that also sees; `changes` are those of its text decoder's config."""
    text = {
        **_SIZES,
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        **changes,
    }
    vision = {**_SIZES, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
