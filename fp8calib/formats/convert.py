"""Convert a scale table to another FP8 format, tensor-parallel degree or granularity.

The notes name what is lost. A scale never becomes smaller than what it has to cover, unless the
notes say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from fp8calib.errors import ExportError, UsageError
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import KV_ROLES, ModelGeometry, Role
from fp8calib.model.tensor_parallel import check_heads, rank_range
from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format


def convert_table(table: ScaleTable, *, fmt: Fp8Format, tp: int = 1, per_head: bool) -> ScaleTable:
    """Convert a table to another format, to other ranks, or to scales per head.

    A rank gets the largest scale of its heads; a head gets the scale of its rank. If the ranks of
    the table do not divide the model's heads, all get the largest scale.

    A code of e4m3fnuz has half the value it has in e4m3fn. Scales are doubled or halved, so that
    dequantized values stay the same.

    Raises:
        UsageError: `tp` does not fit the heads.
        ExportError: a scale is too large for the other format.
    """
    check_heads(table.geometry, tp)
    factor = 2.0 ** (fmt.bias - table.fmt.bias)
    attentions = {
        attention.site(role): attention
        for _, attention in table.geometry.attentions()
        for role in (Role.K, Role.V, Role.Q)
    }
    scales = {}
    for site, scale in table.scales.items():
        attention = attentions[site]
        heads = attention.num_heads if site.role is Role.Q else attention.num_kv_heads
        values = _convert_ranks(table, scale.values, heads, tp, per_head=per_head)
        if factor != 1:
            values = (values * factor).clamp(min=SMALLEST_SCALE)
        if not bool(values.isfinite().all()):
            raise ExportError(
                f"{site}: {float(scale.values.max()):g} cannot be doubled for e4m3fnuz in fp32",
                hint="no value of a model is that large: calibrate again",
            )
        scales[site] = replace(scale, values=values)
    return replace(table, fmt=fmt, tp=1 if per_head else tp, per_head=per_head, scales=scales)


def explain_conversion(
    table: ScaleTable, converted: ScaleTable, *, joins_kv: bool = False, has_query: bool = True
) -> Iterator[str]:
    """Explain what `convert_table` changed, and what the dialect that holds the result loses.

    It may have one scale a layer for k and v, and a place for the scale of q.
    """
    if table.tp not in (1, converted.tp):
        source = f"the scales of {table.tp} ranks"
        if not fits_heads(table.geometry, table.tp):
            yield f"{source} do not fit the model's heads: the largest is used everywhere"
        elif converted.per_head:
            yield f"{source} became the scales of the heads on each rank"
        else:
            yield f"{source} became {converted.tp}: each is the largest of the rank's heads"
    elif table.per_head and not converted.per_head:
        whose = "a layer's heads" if converted.tp == 1 else "the heads on its rank"
        yield f"scales per head became one: the largest of {whose}"
    if (old := table.fmt) is not (new := converted.fmt):
        what = "doubled" if new.bias > old.bias else "halved"
        yield (
            f"the scales for {old.name} are {what} for {new.name}, so that dequantized values stay "
            "the same"
        )
        # the largest value that is left, relative to the largest one in the source format
        covered = new.max * 2.0 ** (new.bias - old.bias) / old.max
        if covered < 1:
            percent = math.ceil((1 - covered) * 1000) / 10
            yield f"values in the top {percent:g} % of the range of {old.name} clip"
    if joins_kv:
        attentions = [attention for _, attention in converted.geometry.attentions()]
        pairs = [
            [converted.scales[each.site(role)].values for role in KV_ROLES] for each in attentions
        ]
        if differing := sum(not torch.equal(k, v) for k, v in pairs):
            yield (
                "k and v of a layer share one scale here, the larger of the two: in "
                f"{differing} of {len(attentions)} layers they differ"
            )
    if not has_query and any(site.role is Role.Q for site in converted.scales):
        yield "q_scale is left out: this format cannot store it"


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


def _convert_ranks(
    table: ScaleTable, values: torch.Tensor, heads: int, tp: int, *, per_head: bool
) -> torch.Tensor:
    """Convert [tp] or [1, heads] of the table to [tp] or [1, heads] of the target.

    A head gets the scale of its rank; one that ranks share gets their largest.
    """
    if (table.per_head, table.tp) == (per_head, 1 if per_head else tp):
        return values
    if table.per_head:
        by_head = values[0]
    elif not fits_heads(table.geometry, table.tp):
        by_head = values.max().expand(heads)
    else:
        by_head = torch.zeros(heads)
        for rank in range(table.tp):
            owned = rank_range(heads, table.tp, rank)
            part = by_head[owned.start : owned.stop]
            part.copy_(part.clamp(min=float(values[rank])))
    return by_head.unsqueeze(0) if per_head else max_per_rank(by_head, tp)
