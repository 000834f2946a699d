"""The forms of quantized weights that are known: how configs name them, and their tensors.

The forms are those that llm-compressor, ModelOpt, Quark, AutoFP8, FBGEMM and this tool write. A
checkpoint that differs from its form is not judged offline: only the engine's loader can tell what
becomes of it. Which forms of compressed-tensors engines serve: vLLM 0.32.0
`compressed_tensors/compressed_tensors.py` (_get_scheme_from_parts), run; SGLang 0.5.23's adaptation
of it, read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, PositiveInt, StringConstraints, ValidationError

from fp8calib.engines.replay.verdicts import Unjudged
from fp8calib.engines.weights.layers import WEIGHT, Shape
from fp8calib.engines.weights.linears import LinearGroup, StoredLinear
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.compressed_tensors import MX_FORMAT, read_scheme
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.numerics.schemes import Granularity, InputScaling, count_blocks

_PACKED, _SHAPE, _SCALE = "weight_packed", "weight_shape", "weight_scale"
INPUT_SCALE = "input_scale"
WEIGHTS = (WEIGHT, _PACKED, _SHAPE)
"""Last parts of the names of tensors that are not scales."""
_SCALE_DTYPES = ("F32", "BF16", "F16")
_CODES = ("F8_E4M3",)
_NUMBER: tuple[Shape, ...] = ((), (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A tensor that a linear has to have: in one of these shapes and dtypes."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = _SCALE_DTYPES
    is_shared: bool = False
    """The engine joins linears, and uses the largest number of all of them."""
    is_requantized: bool = False
    """The engine joins linears, and quantizes them again with the largest number of all of them."""
    may_be_zero: bool = False
    """It may hold zeros, as the scales of groups of zeros do."""


_Word = Annotated[str, StringConstraints(to_lower=True)]
_Dtype = Annotated[str, StringConstraints(pattern=r"^(torch\.)?b?(float|u?int)[0-9][0-9a-z_]*$")]


class _Quantizer(BaseModel, extra="forbid"):
    """compressed-tensors' `QuantizationArgs`, with the values that are read here."""

    type: _Word = "int"
    num_bits: int = 8
    symmetric: Literal[True] = True
    strategy: _Word | None = None
    group_size: Literal[-1] | PositiveInt | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | Literal["local"] = False
    actorder: Literal[False] | None = None
    scale_dtype: _Dtype | None = None
    zp_dtype: _Dtype | None = None
    observer: str | None = None
    observer_kwargs: dict[str, object] = {}

    def __str__(self) -> str:
        how = "dynamic " if self.dynamic else ""
        size = "" if self.group_size in (None, -1) else f" of {self.group_size}"
        inferred = {None: "tensor", -1: "channel"}.get(self.group_size, "group")
        strategy = self.strategy or inferred
        block = " of blocks" if self.block_structure else ""
        exponents = ", exponents" if (self.scale_dtype or "").endswith("uint8") else ""
        return f"{how}{self.type}{self.num_bits} per {strategy}{size}{block}{exponents}"


class CompressedGroup(BaseModel, extra="forbid"):
    """compressed-tensors' `QuantizationScheme`, of a form that vLLM serves."""

    targets: list[str]
    weights: _Quantizer
    input_activations: _Quantizer | None = None
    output_activations: None = None
    format: str | None = None


_PLAIN = "16 bits"
_INT8, _INTS, _NVFP4 = "int-quantized", "pack-quantized", "nvfp4-pack-quantized"
_FP4 = "float4 per tensor_group of 16"
_FP4_INPUTS = (_FP4, f"dynamic {_FP4}")
_INT8_TENSOR = "int8 per tensor"


def read_compressed_group(
    group: Mapping[str, object],
    form: object,
    formats: Collection[str],
    *,
    reads_own_format: bool = True,
) -> StoredScheme | CompressedGroup:
    """Read the scheme of a group of `config_groups` in a config of the format `form`.

    `formats` are those for which the engine has schemes of FP8 weights; a format of the group's own
    comes first where it `reads_own_format`.

    Raises:
        Unjudged: the group is of no form that is known.
    """
    if reads_own_format and group.get("format") is not None:
        form = group["format"]
    try:
        read = CompressedGroup.model_validate(group)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(ascii(str(part))[1:-1][:40] for part in first["loc"])
        raise Unjudged(f"{where} of a config group is of no form that is known") from error
    weights, inputs = str(read.weights), str(read.input_activations or _PLAIN)
    found: StoredScheme | CompressedGroup | None = None
    if form not in formats or not weights.startswith("float8"):
        if _is_served(read, weights, inputs, form):
            found = read.model_copy(update={"format": form})
    else:
        with suppress(ModelError):
            scheme = read_scheme(Path(), "", group)
            is_usual = read.weights.block_structure is None or not scheme.has_static_inputs
            if is_usual and {scheme.is_mx, "exponents" in weights + inputs} == {form == MX_FORMAT}:
                found = scheme
    if found is None:
        whole = f"weights in {weights} with inputs in {inputs} and format {form!a:.40}"
        raise Unjudged(f"{whole} are of no form that is known")
    return found


def _is_served(group: CompressedGroup, weights: str, inputs: str, form: object) -> bool:
    """Tell whether a group of this format, which is not FP8, is of a form that vLLM serves."""
    bits = group.weights.num_bits
    is_packed = weights.startswith((f"int{bits} per group of", f"int{bits} per channel"))
    served = {
        _INT8: weights in (_INT8_TENSOR, "int8 per channel")
        and inputs in (_INT8_TENSOR, "dynamic int8 per token"),
        _INTS: is_packed and bits in (4, 8) and inputs == _PLAIN,
        _NVFP4: weights == _FP4 and inputs in (_PLAIN, *_FP4_INPUTS),
    }
    return isinstance(form, str) and served.get(form, False)


def _list_other_expected(group: CompressedGroup, rows: int, columns: int) -> dict[str, Expected]:
    """List the tensors of a linear in a form that is not FP8."""
    number = Expected(shapes=_NUMBER, is_shared=True)
    inputs, size = str(group.input_activations), group.weights.group_size or 0
    if group.format == _INT8:
        has_number = str(group.weights) == _INT8_TENSOR
        expected = {
            WEIGHT: Expected(shapes=((rows, columns),), dtypes=("I8",)),
            _SCALE: Expected(shapes=_NUMBER if has_number else ((rows, 1),), may_be_zero=True),
        }
        return expected | ({INPUT_SCALE: number} if inputs == _INT8_TENSOR else {})
    if group.format == _INTS:  # of 4 or 8 bits in words of 32
        words = -(-columns * group.weights.num_bits // 32)
        num_groups = columns // size if size > 0 else 1
        return {
            _PACKED: Expected(shapes=((rows, words),), dtypes=("I32",)),
            _SCALE: Expected(shapes=((rows, num_groups),), may_be_zero=True),
            _SHAPE: Expected(shapes=((2,),), dtypes=("I64", "I32")),
        }
    expected = {
        _PACKED: Expected(shapes=((rows, columns // 2),), dtypes=("U8",)),
        _SCALE: Expected(shapes=((rows, columns // 16),), dtypes=_CODES, may_be_zero=True),
        "weight_global_scale": Expected(shapes=_NUMBER),
    }
    return expected | ({"input_global_scale": number} if inputs in _FP4_INPUTS else {})


def list_expected(
    group: LinearGroup,
    linear: StoredLinear,
    scheme: StoredScheme | CompressedGroup,
    dialect: Fp8Dialect,
    renamed: Mapping[str, str],
) -> Mapping[str, Expected]:
    """List the tensors of a quantized linear, one of a group, by the last part of their names.

    `renamed` are other names that the model's loader takes too.
    """
    if isinstance(scheme, CompressedGroup):
        return _list_other_expected(scheme, *linear.shape)
    # ModelOpt's MXFP8 and its experts have the shapes of compressed-tensors.
    is_modelopt = dialect.has_variants and group.kind != "experts" and not scheme.is_mx
    shapes = _NUMBER
    if scheme.weights is Granularity.CHANNEL:
        shapes = ((linear.shape[0],) if is_modelopt else (linear.shape[0], 1),)
    elif scheme.weights is Granularity.BLOCK:
        across, along = count_blocks(linear.shape, scheme.block)
        shapes = ((across, 1, along, 1) if is_modelopt else (across, along),)
    expected = {
        WEIGHT: Expected(shapes=(linear.shape,), dtypes=_CODES),
        dialect.name_scale(scheme.weights): Expected(
            shapes=shapes,
            dtypes=("U8",) if scheme.is_mx else _SCALE_DTYPES,
            is_requantized=scheme.weights is Granularity.TENSOR and group.kind != "experts",
        ),
    }
    if scheme.inputs is InputScaling.STATIC:
        expected[dialect.input_scale_name] = Expected(shapes=_NUMBER, is_shared=True)
    return {
        renamed[name] if renamed.get(name) in linear.tensors else name: each
        for name, each in expected.items()
    }
