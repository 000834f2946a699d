"""The same job as `fp8calib calibrate` through ModelOpt's Python API, in the peers' environment.

python -m scripts.benchmarks.peers.modelopt_calibration MODEL TOKENS DTYPE DEVICE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.benchmarks.workers.timing import load_batches, run_plain

WITH_KV_CACHE = {
    **mtq.FP8_DEFAULT_CFG,
    # the last entry that matches wins
    "quant_cfg": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]],
}
"""Static FP8 weights and activations, and an FP8 KV cache."""


def load_model(name: str, dtype: str, device: str) -> PreTrainedModel:
    """Load the model as the peers' examples do."""
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, dtype), device_map=None if device == "cpu" else device
    ).eval()


def quantize(
    model: PreTrainedModel, batches: list[torch.Tensor], config: dict[str, object]
) -> PreTrainedModel:
    """Insert ModelOpt's quantizers into `model` and calibrate them."""
    return mtq.quantize(model, config, lambda inner: run_plain(inner, batches))


def export(model: PreTrainedModel, out: Path) -> None:
    """Write the quantized checkpoint."""
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(out))


def main(name: str, tokens: Path, dtype: str, device: str, out: Path) -> None:
    """Load, calibrate, export."""
    model = load_model(name, dtype, device)
    export(quantize(model, load_batches(tokens, device), WITH_KV_CACHE), out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
