"""Static FP8 checkpoints as llm-compressor and ModelOpt write them, in the peers' environment.

python scripts/bench_peer_checkpoints.py MODEL TOKENS DTYPE OUT

Weights and inputs per tensor, the KV cache left alone: OUT/llm-compressor and OUT/ModelOpt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel


def main(name: str, tokens: Path, dtype: str, out: Path) -> None:
    """Load the model for each tool, let it calibrate on the tokens, and write."""
    rows = [json.loads(line)["input_ids"] for line in tokens.read_text().splitlines()]
    for tool, write in (("llm-compressor", write_llmcompressor), ("ModelOpt", write_modelopt)):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).eval()
        write(model, rows, str(out / tool))


def write_llmcompressor(model: PreTrainedModel, rows: list[list[int]], out: str) -> None:
    """Quantize with `oneshot` as its examples do."""
    oneshot(
        model=model,
        dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
        max_seq_length=max(map(len, rows)),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(out, save_compressed=True)


def write_modelopt(model: PreTrainedModel, rows: list[list[int]], out: str) -> None:
    """Quantize with `FP8_DEFAULT_CFG` as its examples do."""

    def forward_loop(inner: PreTrainedModel) -> None:
        with torch.no_grad():
            for row in rows:
                inner(torch.tensor([row]))

    quantized = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, forward_loop)
    with torch.inference_mode():
        export_hf_checkpoint(quantized, export_dir=out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
