"""Codes of rows, against ml_dtypes, numpy, and the exact cast of `fp8.cast`."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8calib.numerics.amax import block_amax
from fp8calib.numerics.cast import encode as encode_exactly
from fp8calib.numerics.encode import decode_rows, encode_blocks, encode_rows
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import BLOCK

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
