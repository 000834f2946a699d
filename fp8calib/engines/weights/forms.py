"""The forms of quantized weights that are known: how configs name them, and their tensors.

The forms are those that llm-compressor, ModelOpt, Quark, AutoFP8, FBGEMM and this tool write. A
checkpoint that differs from its form is not judged offline: only the engine's loader can tell what
becomes of it. Which forms of compressed-tensors engines serve: vLLM 0.32.0
`compressed_tensors/compressed_tensors.py` (_get_scheme_from_parts), run; SGLang 0.5.23's adaptation
of it, read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fp8calib.engines.replay.verdicts import Unjudged
from fp8calib.engines.weights.linears import WEIGHT, GroupKind, LinearGroup, Shape, StoredLinear
from fp8calib.errors import shorten
from fp8calib.formats.fp8.compressed_tensors import MX_FORMAT
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.numerics.schemes import (
    BLOCK,
    GROUP_SIZE,
    MX_BLOCK,
    Granularity,
    InputScaling,
    count_blocks,
)

_PACKED, _SHAPE, _SCALE = "weight_packed", "weight_shape", "weight_scale"
INPUT_SCALE = "input_scale"
WEIGHTS = (WEIGHT, _PACKED, _SHAPE)
"""The last parts of the names of tensors that are no scales."""
_SCALE_DTYPES = ("F32", "BF16", "F16")
_CODES = ("F8_E4M3",)
_NUMBER: tuple[Shape, ...] = ((), (1,))


class OtherForm(StrEnum):
    """The forms of compressed-tensors that are no FP8 weights, and that vLLM serves."""

    PACKED = "pack-quantized"
    """Integers of 4 or 8 bits in words of 32, the inputs not quantized."""
    INT8 = "int-quantized"
    NVFP4 = "nvfp4-pack-quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherScheme:
    """A scheme of one of these forms."""

    form: OtherForm
    num_bits: int = 8
    group_size: int = 0
    """The inputs that share a scale; 0 where a row or the whole weight has one."""
    is_per_tensor: bool = False
    has_input_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A tensor that a linear has to have: in one of these shapes and dtypes."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = _SCALE_DTYPES
    is_shared: bool = False
    """The engine uses the largest of those of the linears that are joined with this one."""
    may_be_zero: bool = False
    """It may hold zeros, as the scales of groups of zeros do."""


def list_expected(
    group: LinearGroup,
    linear: StoredLinear,
    scheme: StoredScheme | OtherScheme,
    dialect: Fp8Dialect,
) -> Mapping[str, Expected]:
    """List the tensors of a quantized linear, by the last part of their names.

    Args:
        group: what the linear is joined with.
        linear: one of its members.
        scheme: by the config.
        dialect: that of the config.
    """
    if isinstance(scheme, OtherScheme):
        return _list_other(linear, scheme)
    # ModelOpt's MXFP8 and its experts have the shapes of compressed-tensors.
    is_modelopt = dialect.has_variants and group.kind is not GroupKind.EXPERTS and not scheme.is_mx
    shapes = _NUMBER
    if scheme.weights is Granularity.CHANNEL:
        shapes = ((linear.shape[0],) if is_modelopt else (linear.shape[0], 1),)
    elif scheme.weights is Granularity.BLOCK:
        across, along = count_blocks(linear.shape, scheme.block)
        shapes = ((across, 1, along, 1) if is_modelopt else (across, along),)
    expected = {
        WEIGHT: Expected(shapes=(linear.shape,), dtypes=_CODES),
        dialect.name_scale(scheme.weights): Expected(
            shapes=shapes, dtypes=("U8",) if scheme.is_mx else _SCALE_DTYPES
        ),
    }
    if scheme.inputs is InputScaling.STATIC:
        expected[dialect.input_scale_name] = Expected(shapes=_NUMBER, is_shared=True)
    return expected


def _list_other(linear: StoredLinear, scheme: OtherScheme) -> Mapping[str, Expected]:
    rows, columns = linear.shape
    inputs = {}
    if scheme.has_input_scale:
        name = "input_global_scale" if scheme.form is OtherForm.NVFP4 else INPUT_SCALE
        inputs[name] = Expected(shapes=_NUMBER, is_shared=True)
    if scheme.form is OtherForm.INT8:
        shapes = _NUMBER if scheme.is_per_tensor else ((rows, 1),)
        return {
            WEIGHT: Expected(shapes=(linear.shape,), dtypes=("I8",)),
            _SCALE: Expected(shapes=shapes, may_be_zero=True),
            **inputs,
        }
    if scheme.form is OtherForm.PACKED:
        words = -(-columns * scheme.num_bits // 32)
        groups = columns // scheme.group_size if scheme.group_size else 1
        return {
            _PACKED: Expected(shapes=((rows, words),), dtypes=("I32",)),
            _SCALE: Expected(shapes=((rows, groups),), may_be_zero=True),
            _SHAPE: Expected(shapes=((2,),), dtypes=("I64", "I32")),
        }
    return {
        _PACKED: Expected(shapes=((rows, columns // 2),), dtypes=("U8",)),
        _SCALE: Expected(shapes=((rows, columns // 16),), dtypes=_CODES, may_be_zero=True),
        "weight_global_scale": Expected(shapes=_NUMBER),
        **inputs,
    }


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
