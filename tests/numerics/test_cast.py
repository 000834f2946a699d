"""Formats and exact casts, against ml_dtypes, torch, and a search that shares no code with them."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given
from hypothesis import strategies as st

from fp8calib.numerics.amax import block_amax
from fp8calib.numerics.arrays import round_number
from fp8calib.numerics.cast import encode, round_by_torch_, round_positive_, round_to_format
from fp8calib.numerics.cast import encode as encode_exactly
from fp8calib.numerics.encode import (
    decode_rows,
    decode_scale,
    encode_blocks,
    encode_exponents,
    encode_rows,
    power_of_two_scale_of,
)
from fp8calib.numerics.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    FP8_FORMATS,
    SMALLEST_EXPONENT,
    Fp8Format,
    Rounding,
)
from fp8calib.numerics.schemes import BLOCK, MX_BLOCK, Granularity
from fp8calib.verification.emulation.fake_quantize import Quantizer

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
    for rounding in get_args(Rounding):
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
    assert same(round_to_format(ALL_BFLOAT16, fmt, "toward-zero"), expected)


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
        round_to_format(torch.tensor([x]), E4M3FN, "toward-zero"),
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


SCALES = (1.0, 0.0137, 3.1e-5, 2.0**-126, 7.5e30)


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """Give every finite value of a 16-bit dtype, subnormals and both zeros among them."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()].unsqueeze(0)


def many_fp32() -> torch.Tensor:
    """Give fp32 values of every exponent, and the ties between neighbours of e4m3fn."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator, dtype=torch.int64)
    drawn = bits.to(torch.int32).view(torch.float32)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    nearby = [ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(torch.inf))]
    return torch.cat([drawn[drawn.isfinite()], *nearby, *(-x for x in nearby)]).unsqueeze(0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_those_of_ml_dtypes_and_of_the_exact_cast(
    dtype: torch.dtype, scale: float
) -> None:
    x = many_fp32() if dtype is torch.float32 else every_finite(dtype)
    found = encode_rows(x, torch.tensor(scale)).view(torch.uint8)
    with np.errstate(over="ignore"):
        quotient = np.clip(x.float().numpy() / np.float32(scale), -448, 448)
    expected = quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(found.numpy(), expected)
    assert torch.equal(found, encode_exactly(x.float() / scale, E4M3FN))


def test_every_code_has_the_value_of_ml_dtypes() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)
    found = decode_rows(torch.from_numpy(codes).view(torch.float8_e4m3fn))
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


def test_the_rows_stay_as_they_are() -> None:
    x = torch.tensor([[1.0, -2.0]])
    encode_rows(x, torch.tensor(0.5))
    assert x.tolist() == [[1.0, -2.0]]


def test_every_block_has_its_own_scale() -> None:
    x = torch.full((129, 257), 8.0)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.5]])
    found = encode_blocks(x, scale, BLOCK).float()
    assert found.shape == (129, 257)
    corners = [found[i, j].item() for i in (127, 128) for j in (127, 255, 256)]
    assert corners == [8.0, 4.0, 2.0, 1.0, 0.5, 16.0]


def test_blocks_may_have_any_size() -> None:
    x = torch.arange(1.0, 13.0).reshape(3, 4)
    amax = block_amax(x, (2, 3))
    assert amax.tolist() == [[7.0, 8.0], [11.0, 12.0]]
    assert encode_blocks(x, amax, (2, 3)).float()[1].tolist() == [0.6875, 0.875, 1.0, 1.0]
    assert torch.equal(block_amax(torch.stack([x, 2 * x]), (2, 3)), torch.stack([amax, 2 * amax]))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def scale(amax: torch.Tensor, *, saturates: bool = False) -> torch.Tensor:
    return power_of_two_scale_of(amax, E4M3FN, smallest=SMALLEST_EXPONENT, saturates=saturates)


def find_exponent(amax: Fraction) -> int:
    """Search for the smallest exponent with which a magnitude is at most 448."""
    return next((e for e in range(-127, 128) if amax <= 448 * Fraction(2) ** e), 127)


@given(FLOATS)
def test_the_exponent_is_the_smallest_with_which_nothing_saturates(value: float) -> None:
    (found,) = scale(torch.tensor([abs(value)])).tolist()
    assert found == 2.0 ** find_exponent(Fraction(abs(value)))


@given(FLOATS.filter(lambda value: abs(value) >= 2.0**-110))
def test_the_rule_of_ocp_is_the_exponent_of_the_magnitude_less_eight(value: float) -> None:
    (found,) = scale(torch.tensor([abs(value)]), saturates=True).tolist()
    assert found == 2.0 ** (math.frexp(abs(value))[1] - 1 - 8)


def test_exponents_change_at_448_times_a_power_of_two() -> None:
    edges = torch.tensor([448.0, np.nextafter(np.float32(448), np.float32(500)), 0.0, 2.0**-149])
    assert scale(edges).log2().tolist() == [0, 1, -127, -127]
    assert scale(torch.tensor([480.0, 511.0, 512.0]), saturates=True).log2().tolist() == [0, 0, 1]


def test_every_exponent_is_encoded_as_ml_dtypes_does() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert decode_scale(codes).numpy().tolist() == expected.tolist()
    assert torch.equal(encode_exponents(decode_scale(codes)), codes)
    assert decode_scale(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    largest = scale(torch.tensor([torch.finfo(torch.float32).max]))
    assert encode_exponents(largest).item() < 255


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_those_of_a_division_in_fractions(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    factors = torch.tensor([1.0, 2.0**-12, 1e4, 0.0, 2.0**-24]).repeat_interleave(32)
    rows = (torch.randn(6, 160, generator=generator) * factors).to(dtype)
    rows[0, 0], rows[1, 33] = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    rows[2, 96:128] = -0.0
    scales = scale(block_amax(rows, MX_BLOCK))
    codes = encode_blocks(rows, scales, MX_BLOCK)
    assert scales.shape == (6, 5)
    for row, own, found in zip(rows.tolist(), scales.tolist(), codes.float().tolist(), strict=True):
        for index, value in enumerate(row):
            exact = Fraction(value) / Fraction(own[index // 32])
            nearest = float(np.float64(exact).astype(ml_dtypes.float8_e4m3fn))
            assert found[index] == nearest
            assert abs(exact) <= 448
    for index in range(5):
        amax = max(
            abs(Fraction(value)) for value in rows[:, index * 32 : index * 32 + 32][0].tolist()
        )
        assert scales[0, index].item() == 2.0 ** find_exponent(amax)


def test_compressed_tensors_chooses_the_same_exponents_except_at_the_edge() -> None:
    """It counts an amax of exactly 1.75 times a power of two as too large."""
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0)).mul(8).bfloat16()
    theirs = generate_mx_scales(amax, num_bits=8).to(torch.uint8)
    at_edge = torch.frexp(amax.float()).mantissa == 0.875
    ours = encode_exponents(scale(amax))
    assert torch.equal(ours + at_edge.to(torch.uint8), theirs)
    assert at_edge.any()
    scales = decode_scale(ours)
    assert torch.equal(compress_mx_scale(scales, torch.uint8), ours)
    assert torch.equal(decompress_mx_scale(ours).float(), scales)


def test_scales_of_blocks_with_any_number_of_columns() -> None:
    """The last block of a row is smaller."""
    rows = torch.arange(1.0, 81.0).reshape(2, 40)
    scales = scale(block_amax(rows, MX_BLOCK))
    assert scales.log2().tolist() == [[-3, -3], [-2, -2]]
    codes = encode_blocks(rows, scales, MX_BLOCK).float()
    spread = scales.repeat_interleave(32, 1)[:, :40]
    assert torch.equal((codes * spread)[0, :16], rows[0, :16])


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ROUNDED_ULPS = {"cpu": 1, "cuda": 2}
"""The two sums differ by their order in fp32, which may move a rounding to bfloat16 by one; tensor
cores keep fewer bits of a sum."""


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def distance_in_ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Count the bfloat16 values between two numbers of equal sign."""
    assert torch.equal(a.signbit(), b.signbit())
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_a_static_product_differs_by_a_rounding_at_most(device: str, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).to(device) * magnitude
    weight = torch.randn(128, 256, generator=generator).to(device) * 0.05
    scales = [tensor.abs().max() / 448 for tensor in (x, weight)]
    theirs = torch._scaled_mm(
        to_fp8(x, scales[0]),
        to_fp8(weight, scales[1]).t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=torch.bfloat16,
    )
    x_fake, weight_fake = (
        Quantizer(fmt=E4M3FN, scale=scale).fake(tensor).values
        for tensor, scale in zip((x, weight), scales, strict=True)
    )
    ours = (x_fake @ weight_fake.t()).bfloat16()
    ulps = distance_in_ulps(ours, theirs)
    # Where a sum all but cancels, its order decides: those are compared with the terms' size.
    is_small = theirs.abs() < 1e-3 * theirs.abs().max()
    assert int(ulps[~is_small].max()) <= ROUNDED_ULPS[device]
    assert float((ulps[~is_small] > 0).float().mean()) < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_static_codes_are_those_torch_multiplies(device: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(device)
    scale = x.abs().max() / 448
    fake = Quantizer(fmt=E4M3FN, scale=scale).fake(x).values
    assert torch.equal(fake, to_fp8(x, scale).float() * scale)


def test_dynamic_scales_cover_a_token() -> None:
    x = torch.tensor([[448.0, 1.0], [4.48, 0.01]])
    scale = Quantizer(fmt=E4M3FN, scale=Granularity.TOKEN).scale_for(x)
    assert torch.equal(scale, torch.tensor([[1.0], [4.48 / 448]]))


@given(st.floats(allow_nan=False), st.sampled_from(["bfloat16", "float16", "float32"]))
def test_a_number_is_rounded_twice_as_an_engine_that_loads_it_in_fp32(
    value: float, dtype: str
) -> None:
    expected = torch.tensor(value, dtype=torch.float64).float().to(getattr(torch, dtype))
    assert round_number(value, dtype) == expected.item()
