"""Write static FP8 checkpoints with llm-compressor and ModelOpt, in the peers' environment.

python -m scripts.benchmarks.peers.checkpoints MODEL TOKENS DTYPE OUT

Weights and inputs per tensor, no FP8 KV cache: OUT/llm-compressor and OUT/ModelOpt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import PreTrainedModel

from scripts.benchmarks.peers.modelopt_calibration import export, load_model, quantize
from scripts.benchmarks.workers.timing import load_batches


def main(name: str, tokens: Path, dtype: str, out: Path) -> None:
    """Load the model for each tool, let it calibrate on the tokens, and write."""
    batches = load_batches(tokens, "cpu")
    model = load_model(name, dtype, "cpu")
    run_oneshot(model, batches, make_modifier(), shuffle_calibration_samples=False)
    model.save_pretrained(out / "llm-compressor", save_compressed=True)
    model = load_model(name, dtype, "cpu")
    export(quantize(model, batches, mtq.FP8_DEFAULT_CFG), out / "ModelOpt")


def make_modifier(kv_cache_scheme: dict[str, object] | None = None) -> QuantizationModifier:
    """Make llm-compressor's modifier for static FP8."""
    return QuantizationModifier(
        targets="Linear", scheme="FP8", ignore=["lm_head"], kv_cache_scheme=kv_cache_scheme
    )


def run_oneshot(
    model: PreTrainedModel, batches: list[torch.Tensor], modifier: Modifier, **options: Any
) -> None:
    """Quantize with `oneshot` as llm-compressor's examples do."""
    oneshot(
        model=model,
        dataset=Dataset.from_list([{"input_ids": ids[0].tolist()} for ids in batches]),
        recipe=modifier,
        max_seq_length=max(ids.shape[1] for ids in batches),
        num_calibration_samples=len(batches),
        **options,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
