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

_PACKED_BITS = (4, 8)


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
    found = None
    if scheme.weights is not None and scheme.output_activations is None:
        found = _read_fp8(scheme, form, formats) or _read_other(scheme, form)
    if found is None:
        raise Unjudged(
            f"weights {_describe(scheme.weights)} with inputs "
            f"{_describe(scheme.input_activations)} and format {form!a:.40} are of no form that "
            "is known"
        )
    return found


def _describe(arguments: Any) -> str:
    """Say what a quantizer does; the parameter is a `QuantizationArgs`."""
    if arguments is None:
        return "of 16 bits"
    kind, strategy = arguments.type, arguments.strategy
    how = "dynamic " if arguments.dynamic else ""
    return f"in {how}{getattr(kind, 'value', kind)}{arguments.num_bits} per " + str(
        getattr(strategy, "value", strategy)
    )


def _read_fp8(scheme: Any, form: object, formats: Collection[str]) -> StoredScheme | None:
    weights = scheme.weights
    is_fp8 = (weights.type, weights.num_bits) == ("float", 8)
    inputs = _read_inputs(scheme.input_activations)
    if is_fp8 and _is_static(weights) and form == MX_FORMAT:
        return _read_mx(scheme) if MX_FORMAT in formats else None
    if not is_fp8 or not _is_static(weights) or form not in formats or inputs is None:
        return None
    if weights.strategy not in (Granularity.TENSOR, Granularity.CHANNEL, Granularity.BLOCK):
        return None
    has_blocks = weights.strategy == Granularity.BLOCK
    if has_blocks and (weights.block_structure is None or inputs is InputScaling.STATIC):
        return None
    block = (weights.block_structure[0], weights.block_structure[1]) if has_blocks else BLOCK
    return StoredScheme(weights=Granularity(str(weights.strategy)), block=block, inputs=inputs)


def _read_mx(scheme: Any) -> StoredScheme | None:
    """Read MXFP8; the config may leave the inputs in 16 bits."""
    quantizers = (scheme.weights, scheme.input_activations)
    is_mx = all(each is None or _is_mx(each) for each in quantizers)
    if not is_mx or (quantizers[1] is not None and not quantizers[1].dynamic):
        return None
    inputs = InputScaling.NONE if quantizers[1] is None else InputScaling.GROUP
    return StoredScheme(weights=Granularity.BLOCK, block=MX_BLOCK, inputs=inputs)


def _is_mx(arguments: Any) -> bool:
    how = (arguments.type, arguments.num_bits, arguments.strategy, arguments.group_size)
    has_exponents = str(arguments.scale_dtype) == "torch.uint8"
    return how == ("float", 8, "group", MX_BLOCK[1]) and has_exponents and arguments.symmetric


def _is_static(weights: Any) -> bool:
    return bool(weights.symmetric) and not weights.dynamic


def _read_inputs(inputs: Any) -> InputScaling | None:
    """Read how FP8 inputs are scaled; None where that is of no form that is known."""
    if inputs is None:
        return InputScaling.NONE
    if (inputs.type, inputs.num_bits) != ("float", 8) or not inputs.symmetric:
        return None
    if not inputs.dynamic:
        return InputScaling.STATIC if inputs.strategy == "tensor" else None
    if inputs.strategy in ("token", "tensor"):
        return InputScaling.TOKEN
    is_group = inputs.strategy == "group" and inputs.group_size == GROUP_SIZE
    return InputScaling.GROUP if is_group else None


def _read_other(scheme: Any, form: object) -> OtherScheme | None:
    """Read a form that is no FP8 weight."""
    weights, inputs = scheme.weights, scheme.input_activations
    if not _is_static(weights):
        return None
    if form == OtherForm.NVFP4:
        return _read_nvfp4(weights, inputs)
    is_plain = weights.type == "int" and weights.actorder is None
    if is_plain and form == OtherForm.PACKED:
        return _read_packed(weights, inputs)
    return _read_int8(weights, inputs) if is_plain and form == OtherForm.INT8 else None


def _read_packed(weights: Any, inputs: Any) -> OtherScheme | None:
    is_known = weights.num_bits in _PACKED_BITS and weights.strategy in ("group", "channel")
    if not is_known or inputs is not None:
        return None
    size = weights.group_size if weights.strategy == "group" else 0
    return OtherScheme(form=OtherForm.PACKED, num_bits=weights.num_bits, group_size=size)


def _read_int8(weights: Any, inputs: Any) -> OtherScheme | None:
    is_known = weights.num_bits == 8 and weights.strategy in ("tensor", "channel")
    if not is_known or inputs is None:
        return None
    how = (inputs.type, inputs.num_bits, inputs.symmetric, inputs.strategy, bool(inputs.dynamic))
    if how not in (("int", 8, True, "tensor", False), ("int", 8, True, "token", True)):
        return None
    return OtherScheme(
        form=OtherForm.INT8,
        is_per_tensor=weights.strategy == "tensor",
        has_input_scale=not inputs.dynamic,
    )


def _read_nvfp4(weights: Any, inputs: Any) -> OtherScheme | None:
    quantizers = (weights,) if inputs is None else (weights, inputs)
    for each in quantizers:
        how = (each.type, each.num_bits, each.strategy, each.group_size, each.symmetric)
        if how != ("float", 4, "tensor_group", 16, True):
            return None
    return OtherScheme(form=OtherForm.NVFP4, has_input_scale=inputs is not None)
