"""Search the linears to quantize with ModelOpt's `auto_quantize`, at several sizes.

python -m scripts.benchmarks.peers.modelopt_plan MODEL TOKENS OUT BITS...

Writes a JSON object: for each number of bits a weight, the linears in FP8 with static inputs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from transformers import AutoModelForCausalLM

from scripts.benchmarks.workers.timing import load_batches


def main(folder: str, tokens: Path, out: Path, bits: list[float]) -> None:
    """Search on all sequences, from the gradients of the loss."""
    batches = load_batches(tokens, "cpu")
    found = {each: search(folder, batches, each) for each in bits}
    out.write_text(json.dumps(found))


def search(folder: str, batches: list[torch.Tensor], bits: float) -> list[str]:
    """Give the linears that are quantized."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, _ = mtq.auto_quantize(
        loaded,
        constraints={"effective_bits": bits},
        quantization_formats=[mtq.FP8_DEFAULT_CFG],
        data_loader=batches,
        forward_step=lambda model, batch: model(input_ids=batch, labels=batch),
        loss_func=lambda output, _: output.loss,
        num_calib_steps=len(batches),
        num_score_steps=len(batches),
    )
    return [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    ]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), [float(each) for each in sys.argv[4:]])
