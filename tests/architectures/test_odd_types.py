"""Types of models whose configs and forwards are not like others: the whole way through."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.architectures.vision import VISION
from tests.cli.program import run

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    # its output layer is called `decoder`
    "modernbert-decoder": {**TEXT, "intermediate_size": 48, "cls_token_id": 3, "sep_token_id": 4},
    # transformers does not let the head size of the whole be read where layers differ
    "gemma4_unified": {
        "text_config": {
            **TEXT,
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 2}},
            "model_type": "gemma4_unified_text",
        }
    },
    # its forward takes no text without images, and a parameter of it has three axes
    "blip-2": {
        "text_config": {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "model_type": "opt"},
        "vision_config": VISION,
        "qformer_config": {**VISION, "encoder_hidden_size": 32, "vocab_size": 128},
    },
}


def build(name: str, folder: Path) -> PreTrainedModel:
    config = transformers.CONFIG_MAPPING[name](**KINDS[name])
    kind = AutoModelForImageTextToText if name == "blip-2" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    found: PreTrainedModel = model
    return found


@pytest.mark.parametrize("name", KINDS)
def test_odd_types_are_calibrated_verified_and_quantized(name: str, tmp_path: Path) -> None:
    """The amax of K and V are those of the cache that the model fills."""
    model = build(name, tmp_path / "model")
    text = torch.randint(5, 128, (4, 16), generator=torch.Generator().manual_seed(1))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in text))
    options = (tmp_path / "model", "--data", rows, "--seq-len", 16, "--device", "cpu")

    for command in (
        ("calibrate", *options, "--out", tmp_path / "out"),
        ("verify", *options),
        ("quantize", tmp_path / "model", "--scheme", "w8a16", "--out", tmp_path / "fp8"),
    ):
        done = run(*command)
        assert done.code == 0, done.err

    inner: Any = model.language_model if name == "blip-2" else model
    with torch.inference_mode():
        layers = inner(input_ids=text, use_cache=True).past_key_values.layers
    stats = load_file(tmp_path / "out" / "stats.safetensors")
    for index, layer in enumerate(layers):
        for role, states in (("k", layer.keys), ("v", layer.values)):
            (key,) = (
                key for key in stats if f"layers.{index}." in key and key.endswith(f".{role}/amax")
            )
            assert torch.equal(stats[key], states.float().abs().amax((0, 2, 3)))
