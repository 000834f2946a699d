"""Time the peers' calibration passes against a plain forward, in the peers' environment.

python scripts/bench_peer_pass.py MODEL TOKENS DTYPE DEVICE ROUNDS; prints {name: [seconds]}.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from bench_modelopt import quantize
from bench_timing import load_batches, time_rounds
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, PreTrainedModel


def main(name: str, tokens: Path, dtype: str, device: str, rounds: int) -> None:
    """Time each peer on a fresh copy of the model; the copying is not timed."""
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, dtype), device_map=None if device == "cpu" else device
    ).eval()
    batches = load_batches(tokens, device)
    rows = Dataset.from_list([{"input_ids": ids[0].tolist()} for ids in batches])

    @torch.no_grad()
    def plain() -> None:
        for ids in batches:
            model(ids)

    def prepare_modelopt() -> Callable[[], object]:
        fresh = copy.deepcopy(model)
        return lambda: quantize(fresh, batches)

    def prepare_llmcompressor(pipeline: str) -> Callable[[], object]:
        fresh = copy.deepcopy(model)
        return lambda: _oneshot(fresh, rows, pipeline, batches[0].shape[1])

    runs = {
        "plain": lambda: plain,
        "modelopt": prepare_modelopt,
        "llmcompressor_basic": lambda: prepare_llmcompressor("basic"),
        "llmcompressor_sequential": lambda: prepare_llmcompressor("sequential"),
    }
    with redirect_stdout(sys.stderr):
        seconds = time_rounds(runs, rounds=rounds, device=device)
    print(json.dumps(seconds))


def _oneshot(model: PreTrainedModel, rows: Dataset, pipeline: str, num_tokens: int) -> None:
    kv_cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    oneshot(
        model=model,
        dataset=rows,
        recipe=QuantizationModifier(
            targets="Linear",
            scheme="FP8",
            ignore=["lm_head"],
            kv_cache_scheme={**kv_cache, "dynamic": False},
        ),
        max_seq_length=num_tokens,
        num_calibration_samples=len(rows),
        pipeline=pipeline,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
