"""Recognise quantized checkpoints from config.json and headers."""

from __future__ import annotations

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import INTEGERS, PACKED_BITS
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.weights import is_companion


def check_unquantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is already quantized.

    Raises:
        ModelError: names the config or tensor that shows it.
    """
    for key, section in find_quantization_configs(checkpoint.load_config()):
        method = section.get("quant_method", "unknown")
        raise _quantized(checkpoint, f"{CONFIG_NAME} has a {key} of {method!a:.40}")
    for name, entry in checkpoint.tensors.items():
        is_integer_weight = entry.dtype in INTEGERS and name.endswith(".weight")
        if entry.dtype.startswith("F8_") or entry.dtype in PACKED_BITS or is_integer_weight:
            raise _quantized(checkpoint, f"{name} is stored in {entry.dtype}")
        if is_companion(name):
            raise _quantized(checkpoint, f"{name} is a scale")


def _quantized(checkpoint: Checkpoint, what: str) -> ModelError:
    return ModelError(
        f"{checkpoint.folder}: the model is already quantized: {what}",
        hint="name the unquantized model it was made from, or what `fp8calib dequantize` writes; "
        "`fp8calib export --format rfc --with-weights` reads symmetric int4 weights of "
        "compressed-tensors with one scale per tensor",
    )
