"""Histograms of magnitudes: against numpy, and at edges computed by hand."""

import math
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fp8calib.numerics.histogram import NUM_BINS, count_bins, lower_edge
from tests.simulated_gpus import simulated_gpus


def count_with_numpy(x: torch.Tensor) -> np.ndarray:
    """Truncate to bfloat16 by its bits, then take logarithms in double precision."""
    bits = x.float().numpy().astype(np.float32).view(np.uint32) & np.uint32(0x7FFF0000)
    values = bits.view(np.float32).astype(np.float64).ravel()
    with np.errstate(divide="ignore"):
        bins = np.floor((np.log2(values) + 40) * 8) + 1
    return np.bincount(np.clip(bins, 0, 512).astype(np.int64), minlength=513)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_equal_those_of_numpy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    exponents = torch.empty(3, 1000).uniform_(-45, 27, generator=generator)
    signs = torch.randint(0, 2, (3, 1000), generator=generator) * 2 - 1
    x = (2.0**exponents * signs).to(dtype)
    x[0, :5] = 0.0
    counted = count_bins(x)
    assert counted.dtype is torch.int64
    assert counted.tolist() == count_with_numpy(x).tolist()
    assert int(counted.sum()) == x.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_float_falls_where_numpy_puts_it(dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = codes[codes.isfinite()]
    assert count_bins(x).tolist() == count_with_numpy(x).tolist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0),
        (-0.0, 0),
        (2.0**-41, 0),
        (2.0**-40, 1),
        (0.5, 313),
        (1.0, 321),
        (-1.0, 321),
        (1.0859375, 321),  # the last bfloat16 below 2 ** (1 / 8) = 1.0905
        (1.09375, 322),
        (1.5, 325),  # floor(8 * 0.585) = 4
        (1.9921875, 328),
        (1.9999999, 328),  # truncated to bfloat16, not rounded up to 2
        (2.0, 329),
        (448.0, 391),  # floor(8 * 8.807) = 70
        (2.0**23, 505),
        (2.0**24, 512),
        (3e38, 512),
    ],
)
def test_a_value_falls_into_the_bin_computed_by_hand(value: float, expected: int) -> None:
    assert count_bins(torch.tensor([value])).nonzero().tolist() == [[expected]]


def test_lower_edges_are_eighths_of_octaves() -> None:
    assert NUM_BINS == 513
    assert lower_edge(0) == 0.0
    assert lower_edge(1) == 2.0**-40
    assert lower_edge(321) == 1.0
    assert lower_edge(325) == math.sqrt(2)
    assert lower_edge(329) == 2.0
    assert lower_edge(505) == 2.0**23


def test_a_tensor_in_strides_is_counted_as_it_is_seen() -> None:
    x = torch.arange(1, 25, dtype=torch.bfloat16).reshape(4, 6)
    assert torch.equal(count_bins(x.T), count_bins(x))
    assert int(count_bins(x[:, ::2]).sum()) == 12
    assert int(count_bins(x[:0]).sum()) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_counts_a_tensor_as_a_cpu_does(dtype: torch.dtype) -> None:
    """Values above and below the range, zero and infinity."""
    x = (torch.randn(50, 7) * torch.logspace(-14, 9, 7)).to(dtype)
    x[0, 0], x[1, 0] = 0, math.inf
    with nullcontext() if torch.cuda.is_available() else simulated_gpus(1):
        found = count_bins(x.cuda()).cpu()
    assert torch.equal(found, count_bins(x))
