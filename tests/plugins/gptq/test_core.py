"""GPTQ's core against a solution that computes every optimal update from scratch; its scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8calib.plugins.gptq.core import (
    factorise,
    round_compensated,
    search_scales,
)

OUT, IN = 12, 40


def make_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a weight [OUT, IN] and a Hessian of correlated inputs, one of them ten times larger."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(60, IN)) @ random.normal(size=(IN, IN))
    inputs[:, 3] *= 10
    return random.normal(size=(OUT, IN)), inputs.T @ inputs


def round_e4m3(values: np.ndarray) -> np.ndarray:
    clipped = np.clip(values, -448, 448)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def solve_by_brute_force(
    weight: np.ndarray, hessian: np.ndarray, scale: np.ndarray, *, damping: float
) -> np.ndarray:
    """Round column by column; before each, the open columns are the least-squares optimum."""
    damped = hessian + damping * np.diag(hessian).mean() * np.eye(IN)
    order = np.argsort(-np.diag(hessian), kind="stable")
    scale = np.broadcast_to(scale, weight.shape)
    rounded = np.zeros_like(weight)
    for position, column in enumerate(order):
        done, left = order[:position], order[position:]
        lost = weight[:, done] - rounded[:, done]
        shift = np.linalg.solve(damped[np.ix_(left, left)], damped[np.ix_(left, done)] @ lost.T).T
        optimum = weight[:, column] + shift[:, 0]
        rounded[:, column] = round_e4m3(optimum / scale[:, column]) * scale[:, column]
    return rounded


def spread_blocks(scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return scale.repeat(rows, 0).repeat(columns, 1)[:OUT, :IN]


def make_scale(kind: str, weight: np.ndarray) -> np.ndarray:
    if kind == "tensor":
        return np.full((1, 1), np.abs(weight).max() / 448)
    if kind == "channel":
        return np.abs(weight).max(1, keepdims=True) / 448
    blocks = [[np.abs(weight[r : r + 8, c : c + 16]).max() for c in (0, 16, 32)] for r in (0, 8)]
    return spread_blocks(np.array(blocks) / 448, 8, 16)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_every_column_gets_the_optimal_update(kind: str) -> None:
    weight, hessian = make_case(seed=1)
    scale = make_scale(kind, weight)
    expected = solve_by_brute_force(weight, hessian, scale, damping=0.01)
    factor = factorise(torch.from_numpy(hessian))
    codes = round_compensated(torch.from_numpy(weight), torch.from_numpy(scale), factor)
    found = codes.to(torch.float64).numpy() * scale
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_hessian_of_zeros_rounds_to_nearest() -> None:
    weight, _ = make_case(seed=4)
    scale = make_scale("tensor", weight)
    factor = factorise(torch.zeros(IN, IN))
    codes = round_compensated(torch.from_numpy(weight), torch.from_numpy(scale), factor)
    np.testing.assert_array_equal(codes.to(torch.float64).numpy(), round_e4m3(weight / scale))


def test_an_indefinite_hessian_raises_the_damping_until_it_is_definite() -> None:
    _, hessian = make_case(seed=5)
    lowest = np.diag(hessian).mean() * 0.5
    values, vectors = np.linalg.eigh(hessian)
    values[0] = -lowest
    indefinite = (vectors * values) @ vectors.T
    factor = factorise(torch.from_numpy(indefinite))
    assert factor.damping == pytest.approx(1.0)
    shifted = indefinite + factor.damping * np.diag(indefinite).mean() * np.eye(IN)
    order = factor.order.numpy()
    inverse = np.linalg.inv(shifted[np.ix_(order, order)])
    upper = factor.upper.numpy()
    np.testing.assert_allclose(upper.T @ upper, inverse, rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(upper, np.triu(upper))


def test_a_hessian_that_is_not_finite_is_refused() -> None:
    _, hessian = make_case(seed=7)
    hessian[2, 2] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        factorise(torch.from_numpy(hessian))


def test_every_row_gets_the_best_of_eight_scales() -> None:
    """The last row is zeros."""
    random = np.random.default_rng(8)
    weight = random.normal(size=(200, 300)).astype(np.float32)
    weight[-1] = 0
    importance = random.uniform(size=300) ** 4
    smallest, expected = np.zeros((2, 200), np.float32)
    for i, row in enumerate(weight.astype(np.float64)):
        smallest[i] = np.abs(row).max() / 448 or 1
        tried = [np.float64(smallest[i]) * 2 ** (step / 8) for step in range(8)]
        errors = [((round_e4m3(row / s) * s - row) ** 2 * importance).sum() for s in tried]
        expected[i] = tried[int(np.argmin(errors))]
    scales, weights = torch.from_numpy(smallest), torch.from_numpy(importance).float()
    found = search_scales(torch.from_numpy(weight), scales, weights)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert len({round(float(x)) for x in (found / scales).log2().mul(8).flatten()}) > 3
