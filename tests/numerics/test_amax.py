"""Magnitudes of activations against numpy, in every dtype a model may run in."""

import numpy as np
import pytest
import torch

from fp8calib.numerics.amax import (
    amax_over,
    block_amax,
    channel_amax,
    expert_counts,
    group_amax,
    row_amax,
    segment_amax,
    tensor_amax,
)
from fp8calib.numerics.schemes import BLOCK

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 65, 127, 128, 513])
def test_channels_and_rows_equal_numpy(num_rows: int, dtype: torch.dtype) -> None:
    x = random(num_rows, 7, dtype=dtype)
    magnitudes = np.abs(x.float().numpy())
    np.testing.assert_array_equal(channel_amax(x).numpy(), magnitudes.max(0))
    np.testing.assert_array_equal(row_amax(x).numpy(), magnitudes.max(1))


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
    assert row_amax(x).dtype is torch.float32
    assert block_amax(x, BLOCK).tolist() == [[3.0, 0.5], [0.0, 0.25]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_lost(value: float, dtype: torch.dtype) -> None:
    for row in (0, 50, 99):
        x = random(100, 300, dtype=dtype)
        x[row, 140] = value
        assert not tensor_amax(x).isfinite()
        assert [*(~row_amax(x).isfinite()).nonzero()] == [row]
        assert [*(~channel_amax(x).isfinite()).nonzero()] == [140]
        assert block_amax(x, BLOCK).isfinite().tolist() == [[True, False, True]]
        heads = x.reshape(1, 100, 3, 100).transpose(1, 2)
        assert amax_over(heads, (2, 3)).isfinite().tolist() == [[True, False, True]]


def test_magnitudes_of_subnormals_are_exact() -> None:
    assert row_amax(torch.tensor([[1e-45, -3e-45]])).item() == 2.0**-148  # 3e-45 is 2 x 2**-149
    assert row_amax(torch.tensor([[-(2.0**-133)]]).bfloat16()).item() == 2.0**-133


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_is_left_as_it_was(dtype: torch.dtype) -> None:
    x = random(100, 4, dtype=dtype)
    before = x.clone()
    channel_amax(x)
    amax_over(x.reshape(1, 1, 100, 4), (2, 3))
    assert torch.equal(x, before)


def test_experts_take_the_largest_of_their_rows() -> None:
    values = torch.tensor([[1.0, 5.0], [3.0, 2.0], [4.0, 0.5]])
    experts = torch.tensor([2, 0, 2])
    assert segment_amax(values, experts, 4).tolist() == [[3, 2], [0, 0], [4, 5], [0, 0]]
    assert expert_counts(experts, 4).tolist() == [1, 0, 2, 0]
    assert group_amax(torch.tensor([[1.0, -7.0, 2.0, 3.0]]), 2).tolist() == [[7.0, 3.0]]
    assert group_amax(torch.tensor([[1.0, -7.0, -2.0]]), 2).tolist() == [[7.0, 2.0]]
