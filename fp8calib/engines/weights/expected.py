"""What the tensors of a linear are in the forms of quantized weights that are known.

The forms are those that llm-compressor, ModelOpt, Quark, AutoFP8, FBGEMM and this tool write. A
checkpoint that differs from its form is not judged offline: only the engine's loader can tell what
becomes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8calib.engines.weights.linears import WEIGHT, GroupKind, LinearGroup, Shape, StoredLinear
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.numerics.schemes import Granularity, InputScaling, count_blocks

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
