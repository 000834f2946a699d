"""Scales of tensor-parallel ranks: the maximum over a rank's heads, and back to the heads."""

from __future__ import annotations

import torch

from fp8calib.errors import UsageError
from fp8calib.formats.table import ScaleTable
from fp8calib.model.shapes import ModelGeometry
from fp8calib.model.tensor_parallel import check_heads, rank_range


def max_per_rank(values: torch.Tensor, tp: int) -> torch.Tensor:
    """Take the maximum over the heads of each tensor-parallel rank: [heads] -> [tp]."""
    ranges = (rank_range(len(values), tp, rank) for rank in range(tp))
    return torch.stack([values[heads.start : heads.stop].max() for heads in ranges])


def fits_heads(geometry: ModelGeometry, tp: int) -> bool:
    """Whether `tp` ranks can share the model's heads."""
    try:
        check_heads(geometry, tp)
    except UsageError:
        return False
    return True


def convert_ranks(
    table: ScaleTable, values: torch.Tensor, heads: int, tp: int, *, per_head: bool
) -> torch.Tensor:
    """Convert [tp] or [1, heads] of the table to [tp] or [1, heads] of the target."""
    if (table.per_head, table.tp) == (per_head, 1 if per_head else tp):
        return values
    by_head = _spread_to_heads(table, values, heads)
    return by_head.unsqueeze(0) if per_head else max_per_rank(by_head, tp)


def _spread_to_heads(table: ScaleTable, values: torch.Tensor, heads: int) -> torch.Tensor:
    """Give each head the scale of its rank; a head that ranks share gets their largest."""
    if table.per_head:
        return values[0]
    if not fits_heads(table.geometry, table.tp):
        return values.max().expand(heads)
    by_head = torch.zeros(heads)
    for rank in range(table.tp):
        owned = rank_range(heads, table.tp, rank)
        part = by_head[owned.start : owned.stop]
        part.copy_(part.clamp(min=float(values[rank])))
    return by_head
