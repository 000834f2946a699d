"""Formats and exact casts, against ml_dtypes, torch, and a search that shares no code with them."""

import math
from bisect import bisect_right
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8calib.numerics.cast import (
    encode,
    round_by_torch_,
    round_positive_,
    round_to_format,
)
from fp8calib.numerics.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    FP8_FORMATS,
    Fp8Format,
    Rounding,
)

OTHERS = [
    (E4M3FN, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    (E4M3FNUZ, ml_dtypes.float8_e4m3fnuz, torch.float8_e4m3fnuz),
    (E5M2, ml_dtypes.float8_e5m2, torch.float8_e5m2),
]
NAMES = [fmt.name for fmt, *_ in OTHERS]
BESIDE_BOTH = pytest.mark.parametrize(("fmt", "numpy_dtype", "torch_dtype"), OTHERS, ids=NAMES)
BESIDE_NUMPY = pytest.mark.parametrize(
    ("fmt", "numpy_dtype"), [(fmt, dtype) for fmt, dtype, _ in OTHERS], ids=NAMES
)
EVERY_FORMAT = pytest.mark.parametrize("fmt", [fmt for fmt, *_ in OTHERS], ids=NAMES)
ALL_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
ALL_BFLOAT16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def list_values(fmt: Fp8Format) -> torch.Tensor:
    """List the values of all codes, as the standard defines them."""
    return torch.tensor([fmt.value_of(code) for code in range(256)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values and equal signs of zero; NaN equals NaN whatever its payload."""
    numbers = torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
    signs = torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])
    return numbers and signs and torch.equal(a.isnan(), b.isnan())


@cache
def list_magnitudes(numpy_dtype: type) -> list[float]:
    values = np.arange(256, dtype=np.uint8).view(numpy_dtype).astype(np.float64)
    return sorted({float(v) for v in values if math.isfinite(v) and v >= 0})


def search(x: float, numpy_dtype: type, largest: float) -> float:
    """Find the value toward zero by looking through all 256 of ml_dtypes."""
    if math.isnan(x):
        return math.nan
    magnitudes = list_magnitudes(numpy_dtype)
    below = magnitudes[bisect_right(magnitudes, min(abs(x), largest)) - 1]
    return math.copysign(below, x)


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest"),
    [(E4M3FN, 448.0, 2.0**-9), (E4M3FNUZ, 240.0, 2.0**-10), (E5M2, 57344.0, 2.0**-16)],
    ids=NAMES,
)
def test_the_ends_of_the_range(fmt: Fp8Format, largest: float, smallest: float) -> None:
    assert (fmt.max, fmt.smallest_subnormal) == (largest, smallest)
    assert FP8_FORMATS[fmt.name] is fmt


@BESIDE_NUMPY
def test_ml_dtypes_has_the_same_ends(fmt: Fp8Format, numpy_dtype: type) -> None:
    info = ml_dtypes.finfo(numpy_dtype)
    assert (fmt.max, fmt.smallest_subnormal) == (float(info.max), float(info.smallest_subnormal))
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)
    last = np.float32(fmt.overflow)
    assert last == fmt.overflow
    assert float(last.astype(numpy_dtype)) == fmt.max
    assert not math.isfinite(float(np.nextafter(last, np.float32(np.inf)).astype(numpy_dtype)))


@BESIDE_BOTH
def test_all_codes_have_the_values_of_other_libraries(
    fmt: Fp8Format, numpy_dtype: type, torch_dtype: torch.dtype
) -> None:
    values = list_values(fmt)
    assert same(values, ALL_CODES.view(torch_dtype).float())
    assert same(values, torch.from_numpy(ALL_CODES.numpy().view(numpy_dtype).astype(np.float32)))


@EVERY_FORMAT
def test_all_codes_come_back_from_their_values(fmt: Fp8Format) -> None:
    values = list_values(fmt)
    is_number = values.isfinite()
    assert torch.equal(encode(values, fmt)[is_number], ALL_CODES[is_number])
    for rounding in Rounding:
        assert same(round_to_format(values[is_number], fmt, rounding), values[is_number])


@BESIDE_NUMPY
def test_every_bfloat16_is_rounded_to_the_nearest_as_ml_dtypes_does(
    fmt: Fp8Format, numpy_dtype: type
) -> None:
    clamped = ALL_BFLOAT16.float().clamp(-fmt.max, fmt.max)
    with np.errstate(invalid="ignore"):
        expected = clamped.numpy().astype(numpy_dtype)
    rounded = round_to_format(ALL_BFLOAT16, fmt)
    assert same(rounded, torch.from_numpy(expected.astype(np.float32)))
    is_number = ~clamped.isnan()
    codes = torch.from_numpy(expected.view(np.uint8).copy())
    assert torch.equal(encode(ALL_BFLOAT16, fmt)[is_number], codes[is_number])


@BESIDE_NUMPY
def test_every_bfloat16_is_rounded_toward_zero_as_a_search_finds(
    fmt: Fp8Format, numpy_dtype: type
) -> None:
    expected = torch.tensor([search(float(x), numpy_dtype, fmt.max) for x in ALL_BFLOAT16])
    if fmt is E4M3FNUZ:
        expected = expected + 0.0
    assert same(round_to_format(ALL_BFLOAT16, fmt, Rounding.TOWARD_ZERO), expected)


@BESIDE_NUMPY
@given(x=st.floats(width=32))
def test_any_fp32_is_rounded_to_the_nearest_as_ml_dtypes_does(
    fmt: Fp8Format, numpy_dtype: type, x: float
) -> None:
    number = np.clip(np.float32(x), -fmt.max, fmt.max).astype(np.float32)
    expected = torch.from_numpy(np.array([number]).astype(numpy_dtype).astype(np.float32))
    assert same(round_to_format(torch.tensor([x]), fmt), expected)


@pytest.mark.parametrize(
    ("x", "nearest", "toward_zero"),
    [
        (1.0625, 1.0, 1.0),  # a tie between 1.0 and 1.125
        (1.1875, 1.25, 1.125),  # a tie between 1.125 and 1.25
        (1.12, 1.125, 1.0),
        (-1.12, -1.125, -1.0),
        (2.0**-10, 0.0, 0.0),  # a tie between 0 and the smallest subnormal
        (-(2.0**-10), -0.0, -0.0),
        (3 * 2.0**-10, 2.0**-8, 2.0**-9),
        (0.0167, 0.017578125, 0.015625),  # neighbours 2**-6 and 2**-6 * 1.125
        (448.0, 448.0, 448.0),
        (463.9, 448.0, 448.0),
        (1e30, 448.0, 448.0),
        (-math.inf, -448.0, -448.0),
        (-0.0, -0.0, -0.0),
    ],
)
def test_numbers_worked_by_hand_in_e4m3fn(x: float, nearest: float, toward_zero: float) -> None:
    assert same(round_to_format(torch.tensor([x]), E4M3FN), torch.tensor([nearest]))
    assert same(
        round_to_format(torch.tensor([x]), E4M3FN, Rounding.TOWARD_ZERO),
        torch.tensor([toward_zero]),
    )


def test_nan_takes_the_code_of_nan() -> None:
    nan = torch.tensor([math.nan])
    codes = [int(encode(nan, fmt)) for fmt in (E4M3FN, E4M3FNUZ, E5M2)]
    assert codes == [0x7F, 0x80, 0x7F]


def test_the_argument_is_left_as_it_was() -> None:
    x = torch.tensor([1.06, 1000.0])
    round_to_format(x, E4M3FN)
    assert torch.equal(x, torch.tensor([1.06, 1000.0]))


@EVERY_FORMAT
def test_casts_of_torch_which_gpus_use_give_the_same_values(fmt: Fp8Format) -> None:
    """Every bfloat16, 2 million samples of fp32, and all ties with both neighbours in fp32."""
    bits = torch.arange(-(2**31), 2**31, 2141, dtype=torch.int64).to(torch.int32)
    numbers = list_values(fmt)
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [ties.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf)]
    for x in (ALL_BFLOAT16.float(), bits.view(torch.float32), torch.cat([ties, *beside])):
        clamped = x.clamp(-fmt.max, fmt.max)
        assert same(round_by_torch_(clamped, fmt), round_to_format(x, fmt))


@BESIDE_NUMPY
@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 2.0**20])
def test_what_is_not_negative_is_rounded_in_place_as_ml_dtypes_does(
    fmt: Fp8Format, numpy_dtype: type, scale: float
) -> None:
    """Every bfloat16 and its fp32 neighbours, which are beside the middle between two values."""
    x = ALL_BFLOAT16.float()
    x = torch.cat([x, torch.nextafter(x, x * 0), torch.nextafter(x, x * 2)])
    x = x[~x.signbit() & (x <= fmt.max)]
    expected = torch.from_numpy(x.numpy().astype(numpy_dtype).astype(np.float32)) * scale
    scaled = x * scale
    found = round_positive_(scaled, fmt, scale=scale)
    assert found.data_ptr() == scaled.data_ptr()
    exact = x * scale / scale == x  # but for what the smaller scale takes below the range of fp32
    assert same(found[exact], expected[exact])
