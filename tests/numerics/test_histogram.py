"""Histograms of magnitudes: against numpy, and at edges computed by hand."""

import math
import shutil
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.numerics.histogram import NUM_BINS, count_bins, lower_edge
from fp8calib.numerics.histogram_estimates import clipped_share, spread_counts
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


FOREIGN = {
    E4M3FN: (ml_dtypes.float8_e4m3fn, 448.0, 2.0**-9),
    E4M3FNUZ: (ml_dtypes.float8_e4m3fnuz, 240.0, 2.0**-10),
    E5M2: (ml_dtypes.float8_e5m2, 57344.0, 2.0**-16),
}
"""ml_dtypes' type of each format, its largest value and its smallest one above zero."""
UNIT_BIN = 321
"""[1, 1.09375): 1.09375 is the first bfloat16 from 2 ** (1 / 8) = 1.0905 up."""
UNIT_BIN_END = 1.09375


def make_histogram(counts: dict[int, int]) -> torch.Tensor:
    histogram = torch.zeros(NUM_BINS, dtype=torch.int64)
    for index, count in counts.items():
        histogram[index] = count
    return histogram


def draw(name: str, *, size: int = 200_000) -> np.ndarray:
    """Draw float32 values: bells, heavy tails, rare outliers, half zeros."""
    random = np.random.default_rng(11)
    drawn = {
        "normal": lambda: random.standard_normal(size),
        "laplace": lambda: random.laplace(size=size),
        "tails": lambda: random.standard_t(2, size=size),
        "outliers": lambda: random.standard_normal(size) * (1 + 100 * (random.random(size) < 1e-3)),
        "zeros": lambda: np.maximum(random.standard_normal(size), 0),
    }[name]()
    return drawn.astype(np.float32)


def noise_of(x: np.ndarray, scale: float, fmt: Fp8Format) -> float:
    """Sum the squared errors of saturating casts by ml_dtypes, in double precision."""
    dtype, largest, _ = FOREIGN[fmt]
    scaled = np.clip(x.astype(np.float64) / scale, -largest, largest).astype(np.float32)
    return float(((scaled.astype(dtype).astype(np.float64) * scale - x) ** 2).sum())


def flushed_share(
    histogram: torch.Tensor, scale: float, fmt: Fp8Format, *, amax: float | None = None
) -> float:
    """Give the share of the values outside bin 0 that are below half of the smallest subnormal."""
    spread = spread_counts(histogram, amax=amax)
    below = spread.count_below(scale * FOREIGN[fmt][2] / 2) - spread.num_zeros
    return below / max(spread.total - spread.num_zeros, 1)


def expected_sqnr_db(
    histogram: torch.Tensor, scale: float, fmt: Fp8Format, *, amax: float | None = None
) -> float:
    """Give the ratio of signal and noise, each value spread evenly in log2 over its bin."""
    spread = spread_counts(histogram, amax=amax)
    low, high = spread.edges[:-1], spread.edges[1:]
    signal = (spread.counts * (high**2 - low**2) / (2 * np.log(high / low))).sum()
    noise = spread.squared_errors(np.array([scale]), fmt)[0]
    return 10 * math.log10(signal / noise) if noise else math.inf


# --- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "share"),
    [
        (0.5, 0.5),  # the 8 of 16 values that are no zeros
        (1.0, 0.5),
        (UNIT_BIN_END**0.25, 6 / 16),
        (UNIT_BIN_END**0.5, 4 / 16),
        (UNIT_BIN_END, 0.0),
        (2.0, 0.0),
    ],
)
def test_a_bin_that_is_cut_gives_up_its_share_in_octaves(bound: float, share: float) -> None:
    histogram = make_histogram({0: 8, UNIT_BIN: 8})
    assert clipped_share(histogram, bound / 448, E4M3FN) == pytest.approx(share, abs=1e-4)
    assert clipped_share(histogram, bound / 240, E4M3FNUZ) == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize(
    ("bound", "share"),
    [(1.0, 0.0), (UNIT_BIN_END**0.25, 0.125), (UNIT_BIN_END**0.5, 0.25), (1.5, 0.5), (4.0, 1.0)],
)
def test_flushed_values_are_counted_among_those_above_bin_0(bound: float, share: float) -> None:
    # half of the smallest subnormal is 2 ** -10 in e4m3fn and 2 ** -17 in e5m2; bin 329 is [2, ...
    histogram = make_histogram({0: 1000, UNIT_BIN: 8, UNIT_BIN + 8: 8})
    assert flushed_share(histogram, bound * 2**10, E4M3FN) == pytest.approx(share, abs=1e-12)
    assert flushed_share(histogram, bound * 2**17, E5M2) == pytest.approx(share, abs=1e-12)


def test_the_amax_is_the_last_value_of_the_highest_bin() -> None:
    # Seven values lie in [1, 1.0625), and one at 1.0625.
    histogram = make_histogram({UNIT_BIN: 8})
    assert clipped_share(histogram, 1.0625 / 448, E4M3FN) > 0.3
    assert clipped_share(histogram, 1.0625 / 448, E4M3FN, amax=1.0625) == 0.0
    assert clipped_share(histogram, 1.0624 / 448, E4M3FN, amax=1.0625) == pytest.approx(1 / 8, 0.02)
    half = clipped_share(histogram, 1.0625**0.5 / 448, E4M3FN, amax=1.0625)
    assert half == pytest.approx(4.5 / 8, rel=1e-3)
    assert flushed_share(histogram, 1.0624 * 2**10, E4M3FN, amax=1.0625) == pytest.approx(
        7 / 8, 0.02
    )
    assert flushed_share(histogram, 1.0626 * 2**10, E4M3FN, amax=1.0625) == pytest.approx(1.0)


@pytest.mark.parametrize("amax", [1.0, 1.09374, 1.09375, 1.1, 50.0])
def test_an_amax_that_no_sampled_value_reached_is_one_value_more(amax: float) -> None:
    histogram = make_histogram({UNIT_BIN: 8})
    total = 8 if amax < UNIT_BIN_END else 9
    one = clipped_share(histogram, amax * 0.99999 / 448, E4M3FN, amax=amax)
    assert one == pytest.approx((8 if amax == 1.0 else 1) / total, rel=0.01)
    assert clipped_share(histogram, float(np.float32(amax / 448)), E4M3FN, amax=amax) == 0.0
    assert 20 < expected_sqnr_db(histogram, amax / 448, E4M3FN, amax=amax) < 140


def test_the_last_bin_ends_at_a_larger_amax() -> None:
    histogram = make_histogram({NUM_BINS - 1: 9})
    assert clipped_share(histogram, 2.0**30 / 448, E4M3FN) == 0.0
    start = 2.0**23.875
    first = math.ceil(start / 2**16) * 2**16  # bfloat16 values there are 2 ** 16 apart
    share = clipped_share(histogram, math.sqrt(first * 2.0**40) / 448, E4M3FN, amax=2.0**40)
    assert share == pytest.approx(5 / 9, rel=1e-3)


@pytest.mark.parametrize(
    ("largest", "expected_db"),
    [
        (0.5, 20 * math.log10(1 / 0.5)),  # 1 saturates at 0.5
        (0.9375, 20 * math.log10(1 / 0.0625)),
        (448 * 2.0**10 * 1.001, 0.0),  # 1 / scale is just under half of a subnormal, and vanishes
        (448 * 2.0**9 * 0.75, 20 * math.log10(1 / 0.25)),  # 1 becomes one subnormal of 0.75
        (448 / 1.0625 * 1.00001, 20 * math.log10(17)),  # just under 17/16, and becomes 16/17
    ],
)
def test_the_noise_of_ones_is_computed_by_hand(largest: float, expected_db: float) -> None:
    ones = make_histogram({UNIT_BIN: 5})
    # all five lie between 1 and 1 + 2 ** -20, which is 1e-6
    found = expected_sqnr_db(ones, largest / 448, E4M3FN, amax=1.0)
    assert found == pytest.approx(expected_db, abs=2e-3)
    for exact in (1, 2):  # there is no noise to speak of
        assert expected_sqnr_db(ones, exact / 448, E4M3FN, amax=1.0) > 100


def test_nothing_clips_vanishes_or_is_noise_where_nothing_was_counted() -> None:
    for histogram in (make_histogram({}), make_histogram({0: 9})):
        assert clipped_share(histogram, 1.0, E4M3FN) == 0.0
        assert flushed_share(histogram, 1.0, E4M3FN) == 0.0
        assert expected_sqnr_db(histogram, 1.0, E4M3FN) == math.inf
        assert clipped_share(histogram, 1.0, E4M3FN, amax=3.0) == 0.0


# --- against the raw values --------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FOREIGN, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", ["normal", "laplace", "tails", "outliers", "zeros"])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.01, 300.0, 2.0**14])
def test_shares_and_noise_are_those_of_the_raw_values(
    fmt: Fp8Format, name: str, factor: float
) -> None:
    x = draw(name)
    magnitudes = np.abs(x).astype(np.float64)
    _, largest, smallest = FOREIGN[fmt]
    amax = float(magnitudes.max())
    scale = amax / largest * factor
    histogram = count_bins(torch.from_numpy(x))

    clipped = (magnitudes / scale > largest).mean()
    assert clipped_share(histogram, scale, fmt, amax=amax) == pytest.approx(clipped, abs=2e-3)
    flushed = (magnitudes[magnitudes > 0] / scale < smallest / 2).mean()
    assert flushed_share(histogram, scale, fmt, amax=amax) == pytest.approx(flushed, abs=2e-3)
    sqnr_db = 10 * math.log10((magnitudes**2).sum() / noise_of(x, scale, fmt))
    # few values carry the power of heavy tails, and their places in their bins are not known
    tolerance_db = 1.0 if name in {"tails", "outliers"} else 0.2
    found = expected_sqnr_db(histogram, scale, fmt, amax=amax)
    assert found == pytest.approx(sqnr_db, abs=tolerance_db)
