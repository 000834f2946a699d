"""What ModelOpt writes of the tiny models, in the peers' environment.

python scripts/fixture_modelopt.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from fixture_models import load_model, make_rows, save_output
from modelopt.torch.export import export_hf_checkpoint
from transformers import PreTrainedModel

_KV = mtq.FP8_KV_CFG["quant_cfg"]
_NOTHING = {"quantizer_name": "*", "enable": False}


def with_kv(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add an FP8 KV cache to a config; later entries win."""
    return {**config, "quant_cfg": [*config["quant_cfg"], *_KV]}


CASES: Mapping[str, tuple[str, bool, str, Mapping[str, Any]]] = {
    "fp8-kv": ("llama", False, "FP8_DEFAULT_CFG", with_kv(mtq.FP8_DEFAULT_CFG)),
    # in float32 it divides as we do; in bfloat16 it rounds quotients to that first
    "fp8-float32": ("llama", False, "FP8_DEFAULT_CFG", mtq.FP8_DEFAULT_CFG),
    "fp8-channel-kv": (
        "llama",
        False,
        "FP8_PER_CHANNEL_PER_TOKEN_CFG",
        with_kv(mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
    ),
    "kv": ("llama", True, "nothing", {"quant_cfg": [_NOTHING, *_KV], "algorithm": "max"}),
    "mixtral-fp8-kv": ("mixtral", False, "FP8_DEFAULT_CFG", with_kv(mtq.FP8_DEFAULT_CFG)),
    "gpt2-kv": ("gpt2", True, "FP8_DEFAULT_CFG", with_kv(mtq.FP8_DEFAULT_CFG)),
}
"""By name: the model, whether only the scales are kept, the config's name and the config."""


def main(out: Path) -> None:
    """Make every output."""
    rows = make_rows()

    def run(model: PreTrainedModel) -> None:
        for row in rows:
            model(row.unsqueeze(0))

    for name, (model_name, scales_only, base, config) in CASES.items():
        dtype = torch.float32 if name.endswith("-float32") else torch.bfloat16
        with torch.inference_mode():
            model = mtq.quantize(load_model(out / model_name, dtype), dict(config), run)
            save_output(
                out / f"modelopt-{name}",
                lambda folder, model=model: export_hf_checkpoint(model, export_dir=folder),
                tool="nvidia-modelopt",
                made_by={
                    "config": base if dtype is torch.float32 else f"{base} with FP8_KV_CFG",
                    "model": model_name,
                },
                scales_only=scales_only,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
