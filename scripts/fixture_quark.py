"""What Quark writes of the tiny models, in its own form and in AutoFP8's, in Quark's environment.

python scripts/fixture_quark.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from fixture_models import load_model, make_rows, save_output
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

CASES: Mapping[str, tuple[str, str]] = {
    "fp8-kv": ("llama", "quark"),
    "autofp8-kv": ("llama", "fp8"),
    "mixtral-fp8-kv": ("mixtral", "quark"),
}
"""By name: the model, and the mode of the export."""


def main(out: Path) -> None:
    """Make every output."""
    batches = [row.unsqueeze(0) for row in make_rows()]
    for name, (model_name, mode) in CASES.items():
        template = LLMTemplate.get(model_name)
        config = template.get_config(scheme="fp8", kv_cache_scheme="fp8")
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(load_model(out / model_name), batches))
        with torch.no_grad():
            save_output(
                out / f"quark-{name}",
                lambda folder, model=model, mode=mode: export_safetensors(
                    model, folder, custom_mode=mode
                ),
                tool="amd-quark",
                made_by={"scheme": "fp8", "kv_cache_scheme": "fp8", "custom_mode": mode},
                scales_only=False,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
