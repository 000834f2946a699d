"""The tiny models that the tools quantize for tests/foreign, and how their outputs are kept.

python scripts/fixture_models.py FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 64
NUM_TOKENS = 32
_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # 160 rows are two blocks of 128, of which the second is cut short; vLLM's CPU kernels for FP8
    # want heads of a multiple of 32
    "llama": {"intermediate_size": 160, "head_dim": 32},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
_KEPT_FILES = ("config.json", "hf_quant_config.json")
_WEIGHTS = "model.safetensors"
_KV_NAMES = ("k_scale", "v_scale", "q_scale", "_zero_point", "output_scale")


def make_rows() -> torch.Tensor:
    """Draw the calibration tokens, [8, NUM_TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (8, NUM_TOKENS), generator=generator)


def load_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Load one of the models, in bf16 as users of the tools do."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def save_models(out: Path) -> None:
    """Write every model, random but for the seed."""
    for name, changes in MODELS.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **{**_SMALL, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        _keep(out / name, model.save_pretrained)


def save_output(
    out: Path, write: Callable[[str], object], *, tool: str, made_by: object, scales_only: bool
) -> None:
    """Keep what a tool writes: the configs, the tensors as they are, and who wrote them.

    Args:
        out: the folder of this output.
        write: the tool's own function that writes into a folder.
        tool: the name of its package.
        made_by: the settings it was called with, for readers.
        scales_only: leave out all tensors but those of the KV cache.
    """
    _keep(out, write)
    path = out / _WEIGHTS
    if scales_only:
        tensors = {k: v.clone() for k, v in load_file(path).items() if k.endswith(_KV_NAMES)}
        save_file(tensors, path, metadata={"format": "pt"})
    about = {"tool": tool, "version": version(tool), "made_by": made_by}
    (out / "tool.json").write_text(json.dumps(about, indent=2, default=str) + "\n")
    print(out.name, *sorted(path.name for path in out.iterdir()))


def _keep(out: Path, write: Callable[[str], object]) -> None:
    """Write into a folder that goes away, and keep the files that tests read."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for name in (_WEIGHTS, *_KEPT_FILES):
            if (Path(folder) / name).is_file():
                shutil.copyfile(Path(folder) / name, out / name)


if __name__ == "__main__":
    save_models(Path(sys.argv[1]))
