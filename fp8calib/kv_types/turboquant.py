"""Types whose K is rotated and rounded to the best levels of a Gaussian, and whose V is uniform.

Read in vLLM 0.32.0: model_executor/layers/quantization/turboquant/{config,centroids}.py,
v1/attention/ops/triton_turboquant_store.py and triton_turboquant_decode.py.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fp8calib.kv_types.rotations import hadamard
from fp8calib.numerics.cast import round_to_format
from fp8calib.numerics.formats import E4M3FN

_SMALLEST_NORM = 1e-8
_SMALLEST_SCALE = 1e-8
_SMALLEST_SQUARE = 1e-16
_MOST_ROUNDS = 200
_INTERVALS = 200
_HALF_WIDTH = 3.5
"""Standard deviations that the first levels cover."""


def fp8_key(x: torch.Tensor) -> torch.Tensor:
    """Store K in E4M3 without a scale, and read it back: fp32, the shape of `x`."""
    return round_to_format(x, E4M3FN)


def gaussian_key(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Store K's direction in `bits` a value and its length in fp16, and read it back.

    Args:
        x: K [..., D], where D is a power of two.
        bits: of each value; its level is one of 2**bits.

    Returns:
        fp32, the shape of `x`.
    """
    x = x.float()
    levels = find_gaussian_levels(x.shape[-1], bits).to(x.device)
    norm = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True).float()
    direction = hadamard(x / (norm + _SMALLEST_NORM))
    middles = (levels[1:] + levels[:-1]) / 2
    found = levels[torch.bucketize(direction, middles, right=True)]
    squares = found.double().square().sum(-1, keepdim=True).float()
    length = (squares + _SMALLEST_SQUARE).double().sqrt().float()  # torch's fp32 root is an ulp off
    unit = found * length.reciprocal()
    return hadamard(norm.half().float() * unit)


def uniform_value(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Store V in 2**bits equal steps from its smallest to its largest value, and read it back.

    Step and smallest value are kept in fp16; the codes are computed before they are rounded to it.
    """
    x = x.float()
    last = 2**bits - 1
    low = x.amin(-1, keepdim=True)
    step = ((x.amax(-1, keepdim=True) - low) / last).clamp(min=_SMALLEST_SCALE)
    codes = ((x - low) / step + 0.5).trunc().clamp(0, last)
    read: torch.Tensor = codes * step.half().float() + low.half().float()
    return read


@lru_cache
def find_gaussian_levels(size: int, bits: int) -> torch.Tensor:
    """Find the levels that round a normal variable of variance 1 / size best: fp32 [2**bits].

    Lloyd and Max: a level is the mean of what is nearest to it. The means are those of the
    trapezoidal rule, as the engine computes them.
    """
    sigma = 1 / math.sqrt(size)
    count = 2**bits
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    levels = (2 * places - 1) * _HALF_WIDTH * sigma
    outer = torch.tensor([3 * _HALF_WIDTH * sigma], dtype=torch.float64)
    weights = torch.ones(_INTERVALS + 1, dtype=torch.float64)
    weights[0] = weights[-1] = 0.5
    for _ in range(_MOST_ROUNDS):
        edges = torch.cat([-outer, (levels[1:] + levels[:-1]) / 2, outer])
        shares = torch.linspace(0, 1, _INTERVALS + 1, dtype=torch.float64)
        x = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * shares
        density = torch.exp(-x.square() / (2 * sigma**2)) / math.sqrt(2 * math.pi * sigma**2)
        means = (weights * x * density).sum(1) / (weights * density).sum(1)
        is_done = bool((means - levels).abs().max() < 1e-10)
        if is_done:
            break
        levels = means
    found: torch.Tensor = levels.float()
    return found
