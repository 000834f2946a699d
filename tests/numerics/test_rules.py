"""Rules: read, worked by hand on tiny histograms, and against casts of the raw values."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from fp8calib.errors import UsageError
from fp8calib.numerics.amax import (
    amax_over,
    block_amax,
    expert_counts,
    group_amax,
    segment_amax,
    tensor_amax,
)
from fp8calib.numerics.clip_range import ClipRange, find_clip_range
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.histogram import count_bins
from fp8calib.numerics.rules import AMAX, KNOWN_RULES, Rule, RuleKind, parse_rule
from fp8calib.numerics.schemes import (
    BLOCK,
    SCHEMES,
    Granularity,
    InputScaling,
    Scheme,
    find_nearest,
    find_scheme,
)
from tests.numerics.test_histogram import (
    FOREIGN,
    UNIT_BIN,
    UNIT_BIN_END,
    draw,
    make_histogram,
    noise_of,
)

BIN_WIDTH = 2 ** (1 / 8)


def find_limit(text: str, histogram: torch.Tensor, amax: float, fmt: Fp8Format = E4M3FN) -> float:
    """Follow a rule and require that it could be followed."""
    clip_range = find_clip_range(parse_rule(text), amax=amax, histogram=histogram, fmt=fmt)
    assert clip_range.kept_amax == ""
    assert clip_range.factor == 1
    return min(clip_range.limit, amax)


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("amax", AMAX),
        ("mse", Rule("mse")),
        ("percentile:99.9", Rule("percentile", 99.9)),
        ("percentile:99.9999999", Rule("percentile", 99.9999999)),
        ("percentile:100", Rule("percentile", 100)),
        ("percentile:1e-05", Rule("percentile", 0.00001)),
        ("headroom:1", Rule("headroom", 1)),
        ("headroom:1.5", Rule("headroom", 1.5)),
        ("headroom:1024", Rule("headroom", 1024)),
    ],
)
def test_a_rule_is_read_and_spelled_as_it_was(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule
    assert str(rule) == text


def test_every_rule_is_among_those_that_are_named() -> None:
    for kind in get_args(RuleKind):
        assert kind in KNOWN_RULES


# --- amax and headroom -------------------------------------------------------------------------


def test_amax_leaves_every_magnitude_as_it_is() -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-7, 1 / 3, 448.0, 3.4028234663852886e38])
    for rule in (AMAX, parse_rule("percentile:100"), parse_rule("headroom:1")):
        clip_range = find_clip_range(rule, amax=3.4e38, histogram=None, fmt=E4M3FN)
        assert clip_range == ClipRange()
        assert torch.equal(clip_range.apply(amax), amax)


def test_headroom_multiplies_and_stays_finite() -> None:
    clip_range = find_clip_range(parse_rule("headroom:1.5"), amax=4.0, histogram=None, fmt=E4M3FN)
    found = clip_range.apply(torch.tensor([[0.0, 2.0], [4.0, 3e38]]))
    assert found.tolist() == [[0.0, 3.0], [6.0, torch.finfo(torch.float32).max]]
    assert found.dtype is torch.float32


# --- percentiles -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "limit"),
    [
        (20.0, None),  # 20 of the 100 are zeros
        (30.0, UNIT_BIN_END**0.25),  # 10 of the 40 in [1, 1.09375)
        (40.0, UNIT_BIN_END**0.5),
        (60.0, UNIT_BIN_END),
        (79.5, 2 * 1.0625**0.5),  # 19.5 of the 39 in [2, 2.125)
        (99.0, 2.125),  # the hundredth is the amax itself
        (100.0, 2.125),
    ],
)
def test_a_percentile_is_computed_by_hand(percent: float, limit: float | None) -> None:
    histogram = make_histogram({0: 20, UNIT_BIN: 40, UNIT_BIN + 8: 40})
    rule = Rule("percentile", percent)
    clip_range = find_clip_range(rule, amax=2.125, histogram=histogram, fmt=E4M3FN)
    if limit is None:
        assert clip_range.limit == math.inf
        assert clip_range.kept_amax.startswith("percentile:20 finds only values that are zero")
    else:
        assert min(clip_range.limit, 2.125) == pytest.approx(limit, rel=1e-12)
        assert not clip_range.kept_amax


@pytest.mark.parametrize("name", ["normal", "laplace", "tails", "outliers", "zeros"])
@pytest.mark.parametrize("percent", [60.0, 90.0, 99.0, 99.9, 99.99, 99.999])
def test_a_percentile_is_that_of_the_raw_values(name: str, percent: float) -> None:
    x = np.abs(draw(name))
    found = find_limit(f"percentile:{percent}", count_bins(torch.from_numpy(x)), float(x.max()))
    exact = float(np.percentile(x.astype(np.float64), percent))
    assert exact / BIN_WIDTH < found < exact * BIN_WIDTH
    if percent <= 99.9:  # many values in the bin: where it is cut is as good as known
        assert found == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("percent", ["99.9", "99.9999999", "100"])
def test_no_percentile_exceeds_the_amax(percent: str) -> None:
    histogram = make_histogram({UNIT_BIN: 100})
    assert find_limit(f"percentile:{percent}", histogram, 1.015625) <= 1.015625
    assert find_limit("percentile:100", histogram, 50.0) == 50.0  # though no sample reached it
    assert find_limit("percentile:99", histogram, 50.0) < UNIT_BIN_END


# --- mse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FOREIGN, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", ["normal", "laplace", "outliers", "zeros"])
def test_the_least_error_is_that_of_a_search_over_the_raw_values(fmt: Fp8Format, name: str) -> None:
    x = draw(name, size=50_000)
    amax = float(np.abs(x).max())
    found = find_limit("mse", count_bins(torch.from_numpy(x)), amax, fmt)
    errors = [noise_of(x, amax * 2 ** (-j / 16) / fmt.max, fmt) for j in range(8 * 16)]
    assert 0 < found <= amax
    assert noise_of(x, found / fmt.max, fmt) < 1.05 * min(errors)


@pytest.mark.parametrize(("num_ones", "is_clipped"), [(10**11, False), (10**13, True)])
def test_an_outlier_is_clipped_where_the_others_would_pay_more(
    num_ones: int, is_clipped: bool
) -> None:
    # Covering 2**20 flushes all others, whose 1 to 1.09 is under 2**20 / 448 / 1024 = 2.3, and
    # costs 1.1 each. Clipping to 2**18 or less costs 6e11 to 2**40 = 1.1e12 once, and saves them.
    histogram = make_histogram({UNIT_BIN: num_ones, UNIT_BIN + 8 * 20: 1})
    limit = find_limit("mse", histogram, 2.0**20)
    assert limit < 2.0**18 if is_clipped else limit > 2.0**19.5


def test_an_outlier_that_was_not_sampled_is_weighed_as_one_value() -> None:
    for num_ones in (10**11, 10**13):
        sampled = make_histogram({UNIT_BIN: num_ones, UNIT_BIN + 8 * 20: 1})
        missed = make_histogram({UNIT_BIN: num_ones})
        limit = find_limit("mse", sampled, 2.0**20)
        assert find_limit("mse", missed, 2.0**20) == pytest.approx(limit)


def test_of_equal_errors_the_largest_magnitude_is_taken() -> None:
    # Every octave down to 1.09 does equally well, but for the 8 itself, which is one in 1e15.
    assert 4 < find_limit("mse", make_histogram({UNIT_BIN: 10**15}), 8.0) <= 8
    assert find_limit("mse", make_histogram({UNIT_BIN: 1}), 1.0) == 1.0


# --- where a rule cannot be followed -----------------------------------------------------------


@pytest.mark.parametrize("text", ["mse", "percentile:99.9"])
@pytest.mark.parametrize(
    ("amax", "counts", "told"),
    [
        (3.0, None, "needs a histogram, which is missing: amax is used"),
        (3.0, {}, "needs a histogram, which is missing: amax is used"),
        (3.0, {0: 10}, "finds only values that are zero"),
        (0.0, None, ""),  # zeros alone are left to the fallback
        (0.0, {0: 10}, ""),
    ],
)
def test_a_site_whose_amax_is_kept_says_so(
    text: str, amax: float, counts: dict[int, int] | None, told: str
) -> None:
    histogram = None if counts is None else make_histogram(counts)
    found = find_clip_range(parse_rule(text), amax=amax, histogram=histogram, fmt=E4M3FN)
    assert (found.limit, found.factor) == (math.inf, 1)
    assert found.kept_amax.startswith(f"{text} {told}") if told else not found.kept_amax


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 65, 127, 128, 513])
def test_channels_and_rows_equal_numpy(num_rows: int, dtype: torch.dtype) -> None:
    x = random(num_rows, 7, dtype=dtype)
    magnitudes = np.abs(x.float().numpy())
    np.testing.assert_array_equal(amax_over(x, 0).numpy(), magnitudes.max(0))
    np.testing.assert_array_equal(amax_over(x, -1).numpy(), magnitudes.max(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 40, 67])
def test_heads_equal_numpy_in_every_memory_layout(length: int, dtype: torch.dtype) -> None:
    x = random(2, length, 3, 5, dtype=dtype).transpose(1, 2)
    expected = np.abs(x.float().numpy()).max(axis=(2, 3))
    np.testing.assert_array_equal(amax_over(x, (2, 3)).numpy(), expected)
    np.testing.assert_array_equal(amax_over(x.contiguous(), (2, 3)).numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_and_blocks_by_hand(dtype: torch.dtype) -> None:
    x = torch.zeros(130, 200).to(dtype)
    x[0, 0], x[1, 5], x[127, 130], x[129, 199] = -3.0, 2.0, 0.5, -0.25
    assert tensor_amax(x).item() == 3.0
    assert amax_over(x, -1).dtype is torch.float32
    assert block_amax(x, BLOCK).tolist() == [[3.0, 0.5], [0.0, 0.25]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_lost(value: float, dtype: torch.dtype) -> None:
    for row in (0, 50, 99):
        x = random(100, 300, dtype=dtype)
        x[row, 140] = value
        assert not tensor_amax(x).isfinite()
        assert [*(~amax_over(x, -1).isfinite()).nonzero()] == [row]
        assert [*(~amax_over(x, 0).isfinite()).nonzero()] == [140]
        assert block_amax(x, BLOCK).isfinite().tolist() == [[True, False, True]]
        heads = x.reshape(1, 100, 3, 100).transpose(1, 2)
        assert amax_over(heads, (2, 3)).isfinite().tolist() == [[True, False, True]]


def test_magnitudes_of_subnormals_are_exact() -> None:
    assert amax_over(torch.tensor([[1e-45, -3e-45]]), -1).item() == 2.0**-148  # 2 x 2**-149
    assert amax_over(torch.tensor([[-(2.0**-133)]]).bfloat16(), -1).item() == 2.0**-133


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_is_left_as_it_was(dtype: torch.dtype) -> None:
    x = random(100, 4, dtype=dtype)
    before = x.clone()
    amax_over(x, 0)
    amax_over(x.reshape(1, 1, 100, 4), (2, 3))
    assert torch.equal(x, before)


def test_experts_take_the_largest_of_their_rows() -> None:
    values = torch.tensor([[1.0, 5.0], [3.0, 2.0], [4.0, 0.5]])
    experts = torch.tensor([2, 0, 2])
    assert segment_amax(values, experts, 4).tolist() == [[3, 2], [0, 0], [4, 5], [0, 0]]
    assert expert_counts(experts, 4).tolist() == [1, 0, 2, 0]
    assert group_amax(torch.tensor([[1.0, -7.0, 2.0, 3.0]]), 2).tolist() == [[7.0, 3.0]]
    assert group_amax(torch.tensor([[1.0, -7.0, -2.0]]), 2).tolist() == [[7.0, 2.0]]


NEAREST = {
    "tensor": {"static": "fp8-static", "token": "fp8-dynamic", "group": "fp8-dynamic"},
    "channel": {"static": "fp8-static", "token": "fp8-dynamic", "group": "fp8-dynamic"},
    "block": {"static": "fp8-block", "token": "fp8-block", "group": "fp8-block"},
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_scheme_is_nearest_to_its_own_granularities(scheme: Scheme) -> None:
    assert find_nearest(scheme) is scheme


@pytest.mark.parametrize("weights", NEAREST)
def test_what_is_no_scheme_is_nearest_to_one_that_engines_treat_alike(weights: str) -> None:
    inputs = {**NEAREST[weights], "none": "w8a16"}
    found = {
        name: find_nearest(Scheme(weights=Granularity(weights), inputs=InputScaling(name))).name
        for name in inputs
    }
    assert found == inputs


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="int8") as raised:
        find_scheme("int8")
    assert (
        raised.value.hint
        == "known schemes: fp8-static, fp8-dynamic, w8a16, fp8-block, mxfp8, mxfp8-a16"
    )
