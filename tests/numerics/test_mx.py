"""MXFP8: blocks of 32 values with an exponent, against other implementations and by hand."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given
from hypothesis import strategies as st

from fp8calib.numerics.amax import block_amax
from fp8calib.numerics.encode import (
    decode_scale,
    encode_blocks,
    encode_exponents,
    power_of_two_scale_of,
)
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT
from fp8calib.numerics.schemes import MX_BLOCK

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
