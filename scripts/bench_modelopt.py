"""The same job as `fp8calib calibrate` through ModelOpt's Python API, in the peers' environment.

python scripts/bench_modelopt.py MODEL TOKENS DTYPE DEVICE OUT
"""

from __future__ import annotations

import json
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel


def fp8_config() -> dict[str, object]:
    """Give static FP8 weights and activations, with an FP8 KV cache; later entries win."""
    entries = [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    return {**mtq.FP8_DEFAULT_CFG, "quant_cfg": entries}


def quantize(model: PreTrainedModel, batches: list[torch.Tensor]) -> PreTrainedModel:
    """Insert ModelOpt's quantizers into `model` and calibrate them."""

    def forward_loop(inner: PreTrainedModel) -> None:
        with torch.no_grad():
            for ids in batches:
                inner(ids)

    return mtq.quantize(model, fp8_config(), forward_loop)


def main(name: str, tokens: str, dtype: str, device: str, out: str) -> None:
    """Load, calibrate, export."""
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, dtype), device_map=None if device == "cpu" else device
    ).eval()
    with open(tokens) as file:  # noqa: PTH123 (as in bench_plain.py)
        rows = [json.loads(line)["input_ids"] for line in file]
    quantize(model, [torch.tensor([row], device=device) for row in rows])
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
