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
        method, facts = section.get("quant_method", "unknown"), describe_weights(section)
        what = f"{CONFIG_NAME} has a {key} of {method!a:.40}" + (f" ({facts})" if facts else "")
        raise _quantized(checkpoint, what)
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


def describe_weights(section: Mapping[str, object]) -> str:
    """Repeat what a config says about weights: algorithm, bits, type, granularity."""
    algorithm, groups = section.get("quant_algo"), section.get("config_groups")
    facts = [str(algorithm)[:40]] if isinstance(algorithm, str) else []
    if isinstance(groups, Mapping):
        parts = [each.get("weights") for each in groups.values() if isinstance(each, Mapping)]
    else:  # GPTQ and AWQ describe weights in the section itself
        parts = [section]
    facts += (fact for part in parts if isinstance(part, Mapping) for fact in _list_facts(part))
    return ", ".join(dict.fromkeys(facts))


def _list_facts(weights: Mapping[str, object]) -> Iterator[str]:
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
