"""Recognise quantized checkpoints from config.json and headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import INTEGERS, PACKED_BITS
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.weights import is_companion

_FP8_BITS = 8
_WHOLE_ROW = -1
"""The group size of GPTQ and AWQ for a whole output channel."""


def check_unquantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is already quantized.

    Raises:
        ModelError: names the config or tensor that shows it, and the bits of weights if known.
    """
    for key, section in find_quantization_configs(checkpoint.load_config()):
        raise _quantized(checkpoint, f"{CONFIG_NAME} has a {key} of {_describe_method(section)}")
    for name, entry in checkpoint.tensors.items():
        is_integer_weight = entry.dtype in INTEGERS and name.endswith(".weight")
        if entry.dtype.startswith("F8_") or entry.dtype in PACKED_BITS or is_integer_weight:
            raise _quantized(checkpoint, f"{name} is stored in {entry.dtype}")
        if is_companion(name):
            raise _quantized(checkpoint, f"{name} is a scale")


def _quantized(checkpoint: Checkpoint, what: str) -> ModelError:
    return ModelError(
        f"{checkpoint.folder}: the model is already quantized: {what}",
        hint="name the unquantized model it was made from; `fp8calib quantize --dequantize` reads "
        "FP8 weights, and `fp8calib export --format rfc --with-weights` reads symmetric int4 "
        "weights of compressed-tensors with one scale per tensor; groups, channels, zero points "
        "and FP4 are not supported",
    )


def _describe_method(section: Mapping[str, object]) -> str:
    """Name the method, and what the config says about weights: bits, type, granularity."""
    method = section.get("quant_method", "unknown")
    facts = describe_weights(section)
    return f"{method!a:.40}" + (f" ({facts})" if facts else "")


def describe_weights(section: Mapping[str, object]) -> str:
    """Repeat what a config says about weights: algorithm, bits, type, granularity."""
    algorithm = section.get("quant_algo")
    named = [str(algorithm)[:40]] if isinstance(algorithm, str) else []
    facts = (fact for weights in _find_weights(section) for fact in _describe_weights(weights))
    return ", ".join(dict.fromkeys([*named, *facts]))


def _find_weights(section: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """List the descriptions of weights: the section itself (GPTQ, AWQ), or its groups."""
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping):
        yield section
        return
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _describe_weights(weights: Mapping[str, object]) -> Iterator[str]:
    bits = weights.get("num_bits", weights.get("bits"))
    kind = weights.get("type", "int")
    if isinstance(bits, int) and (bits, kind) != (_FP8_BITS, "float"):
        yield f"{bits}-bit {kind!s:.10} weights"
    size = weights.get("group_size")
    strategy = weights.get("strategy", "channel" if size == _WHOLE_ROW else None)
    if isinstance(size, int) and size > 0:
        yield f"a scale per group of {size}"
    elif isinstance(strategy, str):
        yield f"a scale per {strategy!s:.20}"
    is_symmetric = weights.get("symmetric", weights.get("sym")) is not False
    if not is_symmetric or weights.get("zero_point") is True:
        yield "zero points"
