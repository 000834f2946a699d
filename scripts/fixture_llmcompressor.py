"""What llm-compressor writes of the tiny models, in the peers' environment.

python scripts/fixture_llmcompressor.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from fixture_models import NUM_TOKENS, VOCABULARY, load_model, make_rows, save_output
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_PER_TENSOR = {**_NUMBER, "strategy": "tensor"}
_PER_HEAD = {**_NUMBER, "strategy": "attn_head"}
_PER_CHANNEL = {"targets": ["Linear"], "weights": {**_NUMBER, "strategy": "channel"}}
_HEADS = {"targets": ["LlamaAttention"], "input_activations": _PER_HEAD}
_LINEARS = {"targets": "Linear", "ignore": ["lm_head"]}

CASES: Mapping[str, tuple[str, bool, Mapping[str, Any]]] = {
    "fp8-static-kv": (
        "llama",
        False,
        {**_LINEARS, "scheme": "FP8", "kv_cache_scheme": _PER_TENSOR},
    ),
    "fp8-dynamic": ("llama", False, {**_LINEARS, "scheme": "FP8_DYNAMIC"}),
    "fp8-block": ("llama", False, {**_LINEARS, "scheme": "FP8_BLOCK"}),
    # in float32 it divides as we do; in bfloat16 it rounds scales and quotients to that first
    "fp8-static-float32": ("llama", False, {**_LINEARS, "scheme": "FP8"}),
    "fp8-dynamic-float32": ("llama", False, {**_LINEARS, "scheme": "FP8_DYNAMIC"}),
    "fp8-block-float32": ("llama", False, {**_LINEARS, "scheme": "FP8_BLOCK"}),
    "w8a16": ("llama", False, {"config_groups": {"group_0": _PER_CHANNEL}, "ignore": ["lm_head"]}),
    "kv": ("llama", True, {"targets": [], "kv_cache_scheme": _PER_TENSOR}),
    "kv-head": ("llama", True, {"targets": [], "kv_cache_scheme": _PER_HEAD}),
    # the way of its examples: it leaves q_scale as the memory was
    "attention-head": ("llama", True, {"config_groups": {"group_0": _HEADS}}),
    # its experts are called gate_proj, up_proj and down_proj, Mixtral's own w1, w3 and w2
    "mixtral-fp8-static-kv": (
        "mixtral",
        False,
        {
            "targets": "Linear",
            "ignore": ["lm_head", "re:.*gate$"],
            "scheme": "FP8",
            "kv_cache_scheme": _PER_TENSOR,
        },
    ),
    # its hook does not see the cache of gpt2: a scheme in the config, and no scale
    "gpt2-kv": ("gpt2", True, {"targets": [], "kv_cache_scheme": _PER_TENSOR}),
}
"""By name: the model, whether only the scales are kept, and the modifier's arguments."""


def main(out: Path) -> None:
    """Make every output."""
    rows = Dataset.from_list([{"input_ids": row} for row in make_rows().tolist()])
    for name, (model_name, scales_only, arguments) in CASES.items():
        dtype = torch.float32 if name.endswith("-float32") else torch.bfloat16
        model = load_model(out / model_name, dtype)
        oneshot(
            model=model,
            processor=make_tokenizer(),
            dataset=rows,
            recipe=QuantizationModifier(**arguments),
            num_calibration_samples=len(rows),
            max_seq_length=NUM_TOKENS,
            shuffle_calibration_samples=False,
            pipeline="basic",
        )
        save_output(
            out / f"llmcompressor-{name}",
            lambda folder, model=model: model.save_pretrained(folder, save_compressed=True),
            tool="llmcompressor",
            made_by={"QuantizationModifier": arguments, "model": model_name},
            scales_only=scales_only,
        )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer that `oneshot` asks for and does not use."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
