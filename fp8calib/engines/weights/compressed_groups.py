"""Read a config group of compressed-tensors as vLLM and SGLang do, or say why they refuse it.

compressed-tensors 0.20 `quantization/quant_args.py` (QuantizationArgs, its validation) and vLLM
0.32.0 `compressed_tensors/compressed_tensors.py` (_get_scheme_from_parts), run; SGLang 0.5.23's
adaptation of it, read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.weights.linear_loader import Foreign
from fp8calib.engines.weights.weight_rule import Effect
from fp8calib.fp8.schemes import BLOCK, Granularity, InputScaling

_WEIGHTS = (Granularity.TENSOR, Granularity.CHANNEL, Granularity.BLOCK)
_DYNAMIC_STRATEGIES = ("token", "tensor", "tensor_group", "group")
FIX = "write the config_groups as llm-compressor or fp8calib do"


def find_foreign(group: Mapping[str, object]) -> Foreign | None:
    """Find what a config group says of weights that are not FP8; None where they are.

    vLLM 0.32.0 (run) and SGLang 0.5.23 (read) do not ask for the number of bits of floats
    (`_is_fp8_w8a8`, `_is_fp8_w8a16`).
    """
    weights, inputs = group.get("weights"), group.get("input_activations")
    fields = weights if isinstance(weights, dict) else {"type": "float"}
    kind, num_bits = str(fields.get("type", "int")).lower(), fields.get("num_bits", 8)
    strategy = fields.get("strategy", "tensor")
    if kind == "float" and (num_bits == 8 or strategy in _WEIGHTS):
        return None
    what = f"the config says {num_bits!a:.20} bits of {kind!a:.20}"
    if num_bits == 8 and strategy in ("tensor", "channel") and inputs:
        return Foreign(why=f"{what}: the engine casts its codes", effect=Effect.MISREAD)
    return Foreign(why=what)


def read_compressed_group(group: Mapping[str, object]) -> StoredScheme | None:
    """Read a config group of FP8 weights; None where their scales are of an unknown kind.

    Raises:
        Refusal: compressed-tensors' validation fails.
    """
    weights, inputs = group.get("weights"), group.get("input_activations") or None
    if not isinstance(weights, dict):
        raise Refusal("a config group has no weights (ValidationError)", fix=FIX)
    strategy, scaling = _read_strategy("weights", weights), _read_inputs(inputs)
    is_static = weights.get("symmetric", True) is True and not weights.get("dynamic")
    if strategy not in _WEIGHTS or not is_static:
        return None
    has_blocks = strategy == Granularity.BLOCK
    return StoredScheme(
        weights=Granularity(strategy),
        block=_read_block(weights.get("block_structure")) if has_blocks else BLOCK,
        inputs=scaling,
    )


def require_served(
    group: Mapping[str, object], scheme: StoredScheme | None, form: object, formats: Collection[str]
) -> None:
    """Refuse a config group for which vLLM and SGLang have no scheme.

    Args:
        group: of `config_groups`.
        scheme: what it describes.
        form: its format, or else that of the whole config.
        formats: those for which the engine has schemes of 8 bits.

    Raises:
        Refusal: there is none.
    """
    if form not in formats or scheme is None:
        raise Refusal(
            f"there is no scheme for format {form!a:.40} with weights {group.get('weights')!a:.80} "
            "(NotImplementedError)",
            fix=FIX,
        )
    has_blocks = scheme.weights is Granularity.BLOCK
    if has_blocks and scheme.inputs in (InputScaling.NONE, InputScaling.STATIC):
        how = "static" if scheme.inputs is InputScaling.STATIC else "not quantized"
        raise Refusal(
            f"weights in blocks need dynamic inputs, and these are {how} (AssertionError)", fix=FIX
        )


def _read_strategy(what: str, fields: Mapping[str, object]) -> str:
    """Read and check the strategy of a quantizer, as QuantizationArgs does."""
    size, is_dynamic = fields.get("group_size"), fields.get("dynamic") is True
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(fields.get("strategy") or default).lower()
    if strategy not in _DYNAMIC_STRATEGIES if is_dynamic else strategy == "token":
        how = "dynamic" if is_dynamic else "static"
        raise Refusal(f"{how} {what} per {strategy} are a ValidationError", fix=FIX)
    return strategy


def _read_inputs(inputs: object) -> InputScaling:
    if not isinstance(inputs, dict):
        return InputScaling.NONE
    strategy = _read_strategy("inputs", inputs)
    if inputs.get("dynamic"):
        return InputScaling.GROUP if strategy == "group" else InputScaling.TOKEN
    return InputScaling.STATIC


def _read_block(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value):
        return value[0], value[1]
    raise Refusal(f"block_structure is {value!a:.40} (ValidationError)", fix=FIX)
