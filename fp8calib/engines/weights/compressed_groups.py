"""Read a config group of compressed-tensors with the models of compressed-tensors itself.

Which forms engines serve: vLLM 0.32.0 `compressed_tensors/compressed_tensors.py`
(_get_scheme_from_parts), run; SGLang 0.5.23's adaptation of it, read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fp8calib.engines.replay.verdicts import Unjudged
from fp8calib.engines.weights.expected import OtherForm, OtherScheme
from fp8calib.errors import shorten
from fp8calib.formats.fp8.compressed_tensors import MX_FORMAT
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.numerics.schemes import BLOCK, GROUP_SIZE, MX_BLOCK, Granularity, InputScaling


def read_compressed_group(
    group: Mapping[str, object], form: object, formats: Collection[str]
) -> StoredScheme | OtherScheme:
    """Read the scheme of a group.

    Args:
        group: of `config_groups`.
        form: its format, or else that of the whole config.
        formats: those for which the engine has schemes of FP8 weights.

    Raises:
        Unjudged: compressed-tensors refuses the group, or it is of no form that is known.
    """
    from compressed_tensors.quantization import (  # type: ignore[import-untyped]  # noqa: PLC0415
        QuantizationScheme,
    )

    try:
        scheme = QuantizationScheme.model_validate({**group})
    except Exception as error:
        why = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
        raise Unjudged(f"compressed-tensors refuses a config group ({why})") from error
    weights, inputs = scheme.weights, scheme.input_activations
    is_alone = weights is not None and scheme.output_activations is None
    if is_alone and weights.symmetric and not weights.dynamic:
        read = _read_fp8 if _is_float8(weights) and form in formats else _read_other
        if (found := read(weights, inputs, form)) is not None:
            return found
    raise Unjudged(
        f"weights {_describe(weights)} with inputs {_describe(inputs)} and format {form!a:.40} "
        "are of no form that is known"
    )


def _describe(arguments: Any) -> str:
    """Say what a quantizer does; the parameter is a `QuantizationArgs`."""
    if arguments is None:
        return "of 16 bits"
    kind, strategy = arguments.type, arguments.strategy
    how = "dynamic " if arguments.dynamic else ""
    return f"in {how}{getattr(kind, 'value', kind)}{arguments.num_bits} per " + str(
        getattr(strategy, "value", strategy)
    )


def _is_float8(arguments: Any) -> bool:
    return (arguments.type, arguments.num_bits) == ("float", 8)


def _read_fp8(weights: Any, inputs: Any, form: object) -> StoredScheme | None:
    if form == MX_FORMAT:
        return _read_mx(weights, inputs)
    scaling = _read_inputs(inputs)
    if scaling is None or weights.strategy not in ("tensor", "channel", "block"):
        return None
    block = BLOCK
    if weights.strategy == "block":
        if weights.block_structure is None or scaling is InputScaling.STATIC:
            return None
        block = (weights.block_structure[0], weights.block_structure[1])
    return StoredScheme(weights=Granularity(str(weights.strategy)), block=block, inputs=scaling)


def _read_mx(weights: Any, inputs: Any) -> StoredScheme | None:
    """Read MXFP8; the config may leave the inputs in 16 bits."""
    for each in (weights,) if inputs is None else (weights, inputs):
        how = (each.type, each.num_bits, each.strategy, each.group_size, bool(each.symmetric))
        has_exponents = str(each.scale_dtype) == "torch.uint8"
        if how != ("float", 8, "group", MX_BLOCK[1], True) or not has_exponents:
            return None
    if inputs is not None and not inputs.dynamic:
        return None
    scaling = InputScaling.NONE if inputs is None else InputScaling.GROUP
    return StoredScheme(weights=Granularity.BLOCK, block=MX_BLOCK, inputs=scaling)


def _read_inputs(inputs: Any) -> InputScaling | None:
    """Read how FP8 inputs are scaled; None where that is of no form that is known."""
    if inputs is None:
        return InputScaling.NONE
    if not _is_float8(inputs) or not inputs.symmetric:
        return None
    if not inputs.dynamic:
        return InputScaling.STATIC if inputs.strategy == "tensor" else None
    if inputs.strategy in ("token", "tensor"):
        return InputScaling.TOKEN
    is_group = inputs.strategy == "group" and inputs.group_size == GROUP_SIZE
    return InputScaling.GROUP if is_group else None


def _read_other(weights: Any, inputs: Any, form: object) -> OtherScheme | None:
    """Read a form that is no FP8 weight."""
    if form == OtherForm.NVFP4:
        quantizers = (weights,) if inputs is None else (weights, inputs)
        hows = {
            (each.type, each.num_bits, each.strategy, each.group_size, each.symmetric)
            for each in quantizers
        }
        is_known = hows == {("float", 4, "tensor_group", 16, True)}
        other = OtherScheme(form=OtherForm.NVFP4, has_input_scale=inputs is not None)
        return other if is_known else None
    if weights.type != "int" or weights.actorder is not None:
        return None
    bits, strategy = weights.num_bits, weights.strategy
    if form == OtherForm.PACKED and inputs is None:
        size = weights.group_size if strategy == "group" else 0
        is_known = bits in (4, 8) and strategy in ("group", "channel")
        return (
            OtherScheme(form=OtherForm.PACKED, num_bits=bits, group_size=size) if is_known else None
        )
    if form != OtherForm.INT8 or inputs is None or bits != 8:
        return None
    how = (inputs.type, inputs.num_bits, inputs.symmetric, inputs.strategy, bool(inputs.dynamic))
    is_known = how in (("int", 8, True, "tensor", False), ("int", 8, True, "token", True))
    if not is_known or strategy not in ("tensor", "channel"):
        return None
    return OtherScheme(
        form=OtherForm.INT8,
        is_per_tensor=strategy == "tensor",
        has_input_scale=not inputs.dynamic,
    )
