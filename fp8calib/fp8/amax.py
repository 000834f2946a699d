"""Magnitudes of activations: tensors in, small fp32 tensors out, no model in sight.

Shapes: B batch, S sequence, H heads, D head size, N rows (tokens), C channels, E experts, K experts
a token goes to. The largest and the smallest value are reduced apart: torch's reductions of those
are vectorised, its absolute value would write a copy of the tensor. NaN passes through every
reduction here.
"""

from __future__ import annotations

import torch

_HALVES = (torch.bfloat16, torch.float16)
_FOLD_UNTIL = 32


def channel_amax(x_NC: torch.Tensor) -> torch.Tensor:  # noqa: N803 -- shape suffixes
    """Largest magnitude per channel: fp32 [C]; rows may have several axes, the longest first."""
    rows = tuple(range(x_NC.dim() - 1))
    if _has_fast_codes(x_NC):
        return _fold_codes(x_NC).amax(rows).view(x_NC.dtype).float()
    return torch.maximum(x_NC.amax(rows), x_NC.amin(rows).neg_()).float()


def row_amax(x_NC: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Largest magnitude per row: fp32 [N]."""
    return torch.maximum(x_NC.amax(-1), x_NC.amin(-1).neg_()).float()


def head_amax(x_BHSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Largest magnitude per head: fp32 [H]."""
    if _has_fast_codes(x_BHSD):
        codes_SBHD = _fold_codes(x_BHSD.movedim(2, 0))  # noqa: N806
        return codes_SBHD.amax((0, 1, 3)).view(x_BHSD.dtype).float()
    largest_BHD = torch.maximum(x_BHSD.amax(2), x_BHSD.amin(2).neg_())  # noqa: N806
    return largest_BHD.amax((0, 2)).float()


def _has_fast_codes(x: torch.Tensor) -> bool:
    """Whether to reduce bit patterns: torch's CPU reductions of half floats are slow."""
    return x.dtype in _HALVES and x.device.type == "cpu"


def _fold_codes(x: torch.Tensor) -> torch.Tensor:
    """Give the largest magnitudes over all but a few leading rows, as integer codes.

    Without its sign bit a float orders like an integer, inf and NaN above all numbers. The last
    half is laid over the first, in place: new memory for every half costs a quarter more.
    """
    codes = x.view(torch.int16) & 0x7FFF
    while len(codes) > _FOLD_UNTIL:
        half = len(codes) // 2
        torch.maximum(codes[:half], codes[-half:], out=codes[:half])
        codes = codes[: len(codes) - half]
    return codes


def tokens_first(x_BHSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Lay heads side by side, one row per token: [B*S, H*D]."""
    return x_BHSD.transpose(1, 2).flatten(2).flatten(0, 1)


def block_amax(x_NC: torch.Tensor, block: int) -> torch.Tensor:  # noqa: N803
    """Largest magnitude per row and block of consecutive channels: fp32 [N, C / block]."""
    return row_amax(x_NC.reshape(len(x_NC), -1, block))


def group_amax(
    values_NB: torch.Tensor,  # noqa: N803
    groups_N: torch.Tensor,  # noqa: N803
    num_groups: int,
) -> torch.Tensor:
    """Largest of non-negative `values` among the rows of each group: fp32 [G, B]; 0 for no row."""
    result = values_NB.new_zeros(num_groups, values_NB.shape[1])
    index = groups_N.unsqueeze(1).expand_as(values_NB)
    return result.scatter_reduce_(0, index, values_NB, "amax")


def expert_counts(experts_N: torch.Tensor, num_experts: int) -> torch.Tensor:  # noqa: N803
    """Count the rows of each expert: int64 [E]."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts_N.device)
    return counts.scatter_add_(0, experts_N, torch.ones_like(experts_N, dtype=torch.int64))
