"""Largest magnitudes of tensors: tensors in, small fp32 tensors out.

Shapes: B batch, S sequence, H heads, D head size, N rows (tokens), C channels, E experts, K experts
a token goes to. NaN passes through every reduction here. On a GPU the maximum norm is one kernel,
which reads the tensor once. On a CPU the largest and the smallest value are reduced separately:
torch's reductions of those are vectorised, and its absolute value would write a copy of the tensor.
There torch reduces rows and columns of half floats slowly; their bit patterns are reduced instead.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_HALVES = (torch.bfloat16, torch.float16)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of all elements: fp32 []."""
    if x.device.type != "cpu":
        return _max_norm(x, None)
    smallest, largest = torch.aminmax(x)
    return torch.maximum(largest, smallest.neg()).float()


def amax_over(x: torch.Tensor, axes: int | tuple[int, ...]) -> torch.Tensor:
    """Largest magnitude over some axes: fp32; -1 gives that of rows, 0 that of channels."""
    if x.device.type != "cpu":
        return _max_norm(x, axes)
    if x.dtype in _HALVES:
        # without its sign bit a float orders like an integer, inf and NaN above all numbers
        return (x.view(torch.int16) & 0x7FFF).amax(axes).view(x.dtype).float()
    return torch.maximum(x.amax(axes), x.amin(axes).neg_()).float()


def group_amax(x: torch.Tensor, size: int) -> torch.Tensor:
    """Largest magnitude per `size` consecutive channels: fp32 [..., ceil(C / size)] of [..., C]."""
    missing = -x.shape[-1] % size
    padded = pad(x, (0, missing)) if missing else x
    return amax_over(padded.reshape(*x.shape[:-1], -1, size), -1)


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude per rectangle of rows and columns, those at the edges smaller.

    Args:
        x: [..., R, C], from the first row of a block on.
        block: rows and columns.

    Returns:
        fp32 [..., ceil(R / rows), ceil(C / columns)].
    """
    rows, columns = block
    if rows == 1:
        return group_amax(x, columns)
    strips = torch.stack([amax_over(strip, -2) for strip in torch.split(x, rows, dim=-2)], dim=-2)
    return group_amax(strips, columns)


def segment_amax(
    values_NB: torch.Tensor,  # noqa: N803
    segments_N: torch.Tensor,  # noqa: N803
    num_segments: int,
) -> torch.Tensor:
    """Largest of non-negative `values` among the rows of each segment: fp32 [., B]; 0 for none."""
    result = values_NB.new_zeros(num_segments, values_NB.shape[1])
    index = segments_N.unsqueeze(1).expand_as(values_NB)
    return result.scatter_reduce_(0, index, values_NB, "amax")


def expert_counts(experts_N: torch.Tensor, num_experts: int) -> torch.Tensor:  # noqa: N803
    """Count the rows of each expert: int64 [E]."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts_N.device)
    return counts.scatter_(0, experts_N, 1, reduce="add")


def tokens_first(x_BHSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Lay heads side by side, one row per token: [B*S, H*D]."""
    return x_BHSD.transpose(1, 2).flatten(2).flatten(0, 1)


def _max_norm(x: torch.Tensor, axes: int | tuple[int, ...] | None) -> torch.Tensor:
    narrow = None if x.dtype is torch.float64 else torch.float32
    found: torch.Tensor = torch.linalg.vector_norm(x, torch.inf, axes, dtype=narrow)
    return found.float()
