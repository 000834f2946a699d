"""Convert a scale table to another FP8 format, tensor-parallel degree or granularity.

The notes name what is lost. A scale never becomes smaller than what it has to cover, unless the
notes say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from fp8calib.errors import ExportError
from fp8calib.formats.ranks import convert_ranks, fits_heads
from fp8calib.formats.table import ScaleTable
from fp8calib.model.shapes import Role
from fp8calib.model.tensor_parallel import check_heads
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
        values = convert_ranks(table, scale.values, heads, tp, per_head=per_head)
        if factor != 1:
            values = (values * factor).clamp(min=SMALLEST_SCALE)
        if not bool(values.isfinite().all()):
            raise ExportError(
                f"{site}: {float(scale.values.max()):g} cannot be doubled for e4m3fnuz in fp32",
                hint="no value of a model is that large: calibrate again",
            )
        scales[site] = replace(scale, values=values)
    return ScaleTable(
        geometry=table.geometry,
        fmt=fmt,
        tp=1 if per_head else tp,
        per_head=per_head,
        scales=scales,
        origin=table.origin,
    )


def explain_fit(table: ScaleTable, fitted: ScaleTable) -> tuple[str, ...]:
    """Explain what `convert_table` changed, and what was lost."""
    return (*_explain_ranks(table, fitted), *_explain_format(table.fmt, fitted.fmt))


def explain_joint(table: ScaleTable) -> tuple[str, ...]:
    """Explain what is lost in a dialect with one scale a layer for k and v, and none for q."""
    attentions = [attention for _, attention in table.geometry.attentions()]
    differing = 0
    for attention in attentions:
        k, v = (table.scales[attention.site(role)].values for role in (Role.K, Role.V))
        pair = (k.amax(-1), v.amax(-1)) if table.per_head else (k, v)
        differing += not torch.equal(*pair)
    note = (
        f"k and v of a layer share one scale here, the larger of the two: in {differing} of "
        f"{len(attentions)} layers they differ"
    )
    return (*([note] if differing else []), *explain_no_query(table))


def explain_no_query(table: ScaleTable) -> Iterator[str]:
    """Explain what is lost in a dialect without q."""
    if any(site.role is Role.Q for site in table.scales):
        yield "q_scale is left out: this dialect cannot store it"


def _explain_ranks(table: ScaleTable, fitted: ScaleTable) -> Iterator[str]:
    if table.tp not in (1, fitted.tp):
        all_values = (scale.values for scale in table.scales.values())
        is_equal = all(bool((values == values[0]).all()) for values in all_values)
        source = f"the scales of {table.tp} ranks, which {'are equal' if is_equal else 'differ'}"
        if not fits_heads(table.geometry, table.tp):
            yield f"{source}, do not fit the model's heads: the largest is used everywhere"
        elif fitted.per_head:
            yield f"{source}, became the scales of the heads on each rank"
        elif fitted.tp == 1:
            yield f"{source}, became one: the largest"
        else:
            yield f"{source}, became {fitted.tp}: each is the largest of the rank's heads"
    elif table.per_head and not fitted.per_head:
        whose = "a layer's heads" if fitted.tp == 1 else "the heads on its rank"
        yield f"scales per head became one: the largest of {whose}"
    elif fitted.per_head and not table.per_head and table.tp == 1:
        yield "every head gets the one scale of its layer: scales per head gain nothing here"
    elif table.tp == 1 and not table.per_head and fitted.tp > 1:
        yield f"each of {fitted.tp} ranks gets the one scale of its layer"


def _explain_format(source: Fp8Format, target: Fp8Format) -> Iterator[str]:
    if source is target:
        return
    what = "doubled" if target.bias > source.bias else "halved"
    # The largest value that is left, relative to the largest one in the source format.
    covered = target.max * 2.0 ** (target.bias - source.bias) / source.max
    yield (
        f"the scales for {source.name} are {what} for {target.name}, so that "
        "dequantized values stay the same"
    )
    if covered < 1:
        percent = math.ceil((1 - covered) * 1000) / 10
        yield f"values in the top {percent:g} % of the range of {source.name} clip"
