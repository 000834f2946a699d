"""Write a quantized checkpoint with llm-compressor, ModelOpt or Quark, in that tool's environment.

python -m tests.real_engines.peer_children FORM MODEL TOKENS OUT

No checkpoint has KV scales. TOKENS are for the forms with static inputs, which calibrate on them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.benchmarks.workers.timing import load_batches

_GROUP = 64
"""Columns that share a scale of four bits: the presets' 128 does not divide 576."""
FORMS: Mapping[str, str] = {
    "fp8": "FP8",
    "fp8-dynamic": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8": "W8A8",
    "w8a16-int": "W8A16",
    "w4a16": "W4A16",
    "w4a16-asym": "W4A16_ASYM",
    "nvfp4": "NVFP4",
    "nvfp4a16": "NVFP4A16",
    "mxfp4a16": "MXFP4A16",
    "modelopt-fp8": "FP8_DEFAULT_CFG",
    "modelopt-fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "modelopt-nvfp4": "NVFP4_DEFAULT_CFG",
    "quark-fp8": "quark",
    "quark-autofp8": "fp8",
}
"""The tool's own name of each form: a preset of compressed-tensors where no tool is named."""


def main(form: str, name: str, tokens: Path, out: Path) -> None:
    """Quantize and save, with the tokenizer of the model."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    tool = form.split("-", maxsplit=1)[0]
    write = {"modelopt": write_modelopt, "quark": write_quark}.get(tool, write_compressed)
    write(FORMS[form], model, load_batches(tokens, "cpu"), out)
    for path in Path(name).iterdir():
        if path.suffix == ".json" and "token" in path.name and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def write_compressed(
    preset: str, model: PreTrainedModel, batches: list[torch.Tensor], out: Path
) -> None:
    """Quantize with llm-compressor, which rounds to nearest."""
    modifiers: Any = import_module("llmcompressor.modifiers.quantization")
    schemes: Any = import_module("compressed_tensors.quantization")
    checkpoints: Any = import_module("scripts.benchmarks.peers.checkpoints")
    scheme = schemes.preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.strategy == "group" and scheme.weights.type == "int":
        scheme.weights.group_size = _GROUP
    modifier = modifiers.QuantizationModifier(
        config_groups={"group_0": scheme.model_dump()}, ignore=["lm_head"]
    )
    checkpoints.run_oneshot(model, batches, modifier, shuffle_calibration_samples=False)
    model.save_pretrained(out, save_compressed=True)


def write_modelopt(
    config: str, model: PreTrainedModel, batches: list[torch.Tensor], out: Path
) -> None:
    """Quantize with ModelOpt."""
    mtq: Any = import_module("modelopt.torch.quantization")
    calibration: Any = import_module("scripts.benchmarks.peers.modelopt_calibration")
    calibration.export(calibration.quantize(model, batches, getattr(mtq, config)), out)


def write_quark(mode: str, model: PreTrainedModel, batches: list[torch.Tensor], out: Path) -> None:
    """Quantize with Quark."""
    quark: Any = import_module("quark.torch")
    config = quark.LLMTemplate.get("llama").get_config(scheme="fp8")
    quantizer = quark.ModelQuantizer(config)
    with torch.no_grad():
        frozen = quantizer.freeze(quantizer.quantize_model(model, batches))
        quark.export_safetensors(frozen, str(out), custom_mode=mode)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
