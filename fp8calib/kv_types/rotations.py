"""Hadamard rotations of vectors of one token and head, as the cache writes of vLLM apply them."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

_SIGN_SEED = 0x9E3779B9
"""Of the signs of the randomized rotation: vLLM 0.32.0 v1/attention/ops/int4_per_token_head.py
_get_rht_signs."""


def largest_power_of_two(size: int) -> int:
    """Find the largest power of two that divides `size`."""
    return size & -size


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotate fp32 vectors [..., D] by the orthonormal Hadamard matrix, which is its own inverse.

    Where D is no power of two, blocks of the largest one that divides it are rotated apart.
    """
    block = largest_power_of_two(x.shape[-1])
    return (_sum_by_signs(x, block) / math.sqrt(block)).reshape(x.shape)


def rotate_randomly(x: torch.Tensor) -> torch.Tensor:
    """Rotate vectors [..., D] by the Hadamard matrix after random signs, to sqrt(block) the length.

    On a GPU the product takes bfloat16 and gives bfloat16, whatever the model's dtype is
    (`fast_hadamard_transform`).
    """
    block = largest_power_of_two(x.shape[-1])
    signed = x.float() * _find_signs(block).repeat(x.shape[-1] // block).to(x.device)
    root = math.sqrt(block)
    unit = _sum_by_signs(signed.bfloat16().float(), block) / root
    return (unit.bfloat16().float() * root).reshape(x.shape).to(x.dtype)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Undo `rotate_randomly` in fp32: fp32 [..., D]."""
    block = largest_power_of_two(x.shape[-1])
    signs = _find_signs(block).repeat(x.shape[-1] // block).to(x.device)
    return (_sum_by_signs(x, block) / block).reshape(x.shape) * signs


def _sum_by_signs(x: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply by the matrix of ones and minus ones, rounded once: fp32 [..., D / block, block].

    With sums in fp32 their order would decide ties of four-bit codes, and a model amplifies one.
    """
    blocks = x.double().reshape(*x.shape[:-1], -1, block)
    return torch.matmul(blocks, _matrix(block).to(x.device)).float()


@lru_cache
def _matrix(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return matrix


@lru_cache
def _find_signs(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1
