"""Block scales that do not survive how engines join projections and cut them for ranks.

A block of 128 x 128 has one scale. vLLM and SGLang load q, k and v, or gate and up, into one
weight, and give every rank a part of its rows or columns; where a part ends inside a block they
stop, or give rows a scale that is not theirs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate

from fp8calib.engines.engine import Effect
from fp8calib.engines.weights.faults import (
    QuantizedLinear,
    QuantizedWeights,
    WeightFault,
    fault_per_engine,
    name_fused_group,
)
from fp8calib.geometry.model_geometry import Linear, ModelGeometry, Part
from fp8calib.geometry.tensor_parallel import rank_range

_SOURCES = {
    "vllm": "vLLM 0.32.0 layers/linear.py, quantization/utils/fp8_utils.py "
    "(validate_fp8_block_shape)",
    "sglang": "SGLang 0.5.23 layers/quantization/fp8_utils.py, fp8.py (validate_fp8_block_shape)",
}
_SOURCE_FINER = "vLLM 0.32.0 layers/fused_moe/oracle/fp8.py (refine_fp8_moe_block_shape)"
_MIN_FINER_BLOCK = 32
_DIALECTS = ("compressed-tensors", "autofp8", "quark")
"""Whose block scales both engines load as described here."""
_SGLANG_JOINED = ("q_proj+k_proj+v_proj", "gate_proj+up_proj", "w1+w3")
"""What SGLang loads into one weight in every model; the others in some."""
_ROW_EXPERTS = ("down_proj", "w2")
"""Projections of experts whose inputs are cut for ranks; of the others it is the outputs."""
_FIX = "quantize with one scale per tensor or per channel"
_MEND_RANKS = f"serve it with fewer ranks, or {_FIX}"
_MEND_EXPERTS = f"serve it with expert parallelism or fewer ranks, or {_FIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """A projection that is loaded into one weight with others; equal to those of its sizes."""

    module: str = field(compare=False)
    stored: int
    """Its outputs in the checkpoint."""
    rows: int
    """Those of one rank."""
    num_slices: int
    """How many ranks have rows of their own; others hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """Projections that are loaded into one weight, in its order."""

    shares: tuple[_Share, ...]
    block: int
    tp: int
    is_stored_joined: bool = False
    """The checkpoint holds them in one weight too, where blocks go on from one to the next."""

    @property
    def group(self) -> str:
        """Name what they are loaded into."""
        return name_fused_group(self.shares[0].module).rpartition(".")[2]

    def find_torn(self, *, is_last_too: bool) -> _Share | None:
        """Find a projection whose end does not fill a block; the last one need not on one rank."""
        checked = self.shares if is_last_too or self.tp > 1 else self.shares[:-1]
        return next((share for share in checked if share.rows % self.block), None)


def list_joined_faults(weights: QuantizedWeights) -> list[WeightFault]:
    """List what loses blocks on one rank because it is loaded into one weight with others."""
    if weights.dialect not in _DIALECTS:
        return []
    return [
        *_judge_experts(weights, 1, _FIX),
        *_judge(_join_by_name(weights.linears), weights.dialect),
    ]


def list_rank_faults(
    weights: QuantizedWeights, geometry: ModelGeometry, tp: int
) -> list[WeightFault]:
    """List what loses blocks by the cut for `tp` ranks.

    What the checkpoint itself holds in one weight is looked at on one rank too.
    """
    if weights.dialect not in _DIALECTS:
        return []
    blocks = {each.module: each.block for each in weights.linears if each.block is not None}
    found = list(_find_linears(blocks, geometry))
    if tp > 1 and (why := next(filter(None, (_explain_cut(*each, tp) for each in found)), "")):
        return list(fault_per_engine(_SOURCES, Effect.REFUSED, why, _MEND_RANKS))
    joined = _join_on_ranks(found, tp)
    return [
        *(_judge_experts(weights, tp, _MEND_EXPERTS) if tp > 1 else ()),
        *_judge((each for each in joined if tp > 1 or each.is_stored_joined), weights.dialect),
    ]


def _judge(joined: Iterable[_Joined], dialect: str) -> Iterator[WeightFault]:
    """Give the first fault of each engine."""
    every = list(joined)
    for engine in _SOURCES:
        faults = (_judge_one(engine, each, dialect) for each in every)
        if (fault := next(filter(None, faults), None)) is not None:
            yield fault


def _judge_one(engine: str, joined: _Joined, dialect: str) -> WeightFault | None:
    if engine == "sglang" and joined.group not in _SGLANG_JOINED:
        return None
    torn = joined.find_torn(is_last_too=engine == "sglang" and dialect == "autofp8")
    if torn is None:
        return None
    effect: Effect | None = Effect.REFUSED
    if engine == "vllm" and dialect == "autofp8":  # its `_maybe_allow_fp8_block_shape_mismatch`
        effect = _copy_scales(joined)
    if effect is None:
        return None
    where = f" on each of {joined.tp} ranks" if joined.tp > 1 else ""
    what = "is loaded into one weight with others, whose blocks would begin elsewhere"
    end = ": rows get scales that are not theirs" if effect is Effect.MISREAD else ""
    return WeightFault(
        engine=engine,
        effect=effect,
        why=f"{torn.module} has {torn.rows} outputs{where}, no multiple of {joined.block}, and "
        f"{what}{end}",
        source=_SOURCES[engine],
        fix=_FIX if joined.tp == 1 else _MEND_RANKS,
    )


@cache
def _copy_scales(joined: _Joined) -> Effect | None:
    """Replay which scales vLLM's `fp8` method copies where, where it has not checked the sizes.

    Layers of the same sizes fare alike, and are replayed once.

    Returns:
        REFUSED where a slice lies outside of a tensor, MISREAD where a row gets another one's
        scale, None where all is well.
    """
    block, shares = joined.block, joined.shares
    begins = [0, *accumulate(share.rows for share in shares)]
    num_scales = math.ceil(begins[-1] / block)
    stored_begins = [0, *accumulate(share.stored for share in shares)]
    stored_counts = [math.ceil(share.stored / block) for share in shares]
    stored_scales = [0, *accumulate(stored_counts)]
    if joined.is_stored_joined and stored_scales[-1] > math.ceil(stored_begins[-1] / block):
        return Effect.REFUSED
    is_misread = False
    for rank in range(joined.tp):
        held: list[int | None] = [None] * num_scales
        for number, share in enumerate(shares):
            first, count = math.ceil(begins[number] / block), math.ceil(share.rows / block)
            taken = rank * share.num_slices // joined.tp * count
            if first + count > num_scales or taken + count > stored_counts[number]:
                return Effect.REFUSED
            begin = stored_scales[number] + taken
            held[first : first + count] = range(begin, begin + count)
        for number, share in enumerate(shares):
            slice_begin = rank * share.num_slices // joined.tp * share.rows
            for row in range(share.rows):
                meant = (
                    (stored_begins[number] + slice_begin + row) // block
                    if joined.is_stored_joined
                    else stored_scales[number] + (slice_begin + row) // block
                )
                is_misread |= held[(begins[number] + row) // block] != meant
    return Effect.MISREAD if is_misread else None


def _judge_experts(weights: QuantizedWeights, tp: int, fix: str) -> Iterator[WeightFault]:
    """Judge the first projection of an expert that ends inside a block, alone or on a rank.

    The scales of all experts of a layer are one tensor, in which every part fills its blocks.
    """
    torn = ((each, _explain_torn_expert(each, tp)) for each in weights.linears)
    expert, why = next((found for found in torn if found[1]), (None, ""))
    if expert is None:
        return
    finer = _find_finer_block(expert, tp) if weights.dialect == "autofp8" else 0
    for fault in fault_per_engine(_SOURCES, Effect.REFUSED, f"{why}: ValueError", fix):
        if fault.engine == "vllm" and finer:
            yield replace(
                fault,
                effect=Effect.CONDITION,
                why=f"{why}: it repeats the scales for blocks of {finer}, which only its Triton "
                "kernels take, on GPUs",
                source=_SOURCE_FINER,
            )
        else:
            yield fault


def _explain_torn_expert(linear: QuantizedLinear, tp: int) -> str:
    """Say where a projection of an expert ends inside a block; empty if it does not."""
    if linear.block is None or not linear.is_expert:
        return ""
    is_row = linear.module.endswith(_ROW_EXPERTS)
    if tp == 1 and (is_row or len(_list_parts(linear.fused_group)) == 1):
        return ""
    size, length = linear.shape[int(is_row)], linear.block[int(is_row)]
    if size % (tp * length) == 0:
        return ""
    side = "inputs" if is_row else "outputs"
    where = f" on each of {tp} ranks" if tp > 1 else ""
    return f"{linear.module} has {size / tp:g} {side}{where}, no multiple of {length}"


def _find_finer_block(linear: QuantizedLinear, tp: int) -> int:
    """Find the smaller blocks that vLLM's `fp8` method repeats an expert's scales for; 0 if none.

    As vLLM 0.32.0 does it: a size of at least 32 that divides the blocks, both sides of the
    weight, and what a rank has of the side that is cut.
    """
    is_row = linear.module.endswith(_ROW_EXPERTS)
    cut, whole = linear.shape[int(is_row)], linear.shape[int(not is_row)]
    if linear.block is None or cut % tp:
        return 0
    size = math.gcd(*linear.block, cut // tp, whole)
    return size if size >= _MIN_FINER_BLOCK else 0


def _join_by_name(linears: Collection[QuantizedLinear]) -> Iterator[_Joined]:
    groups: dict[str, dict[str, QuantizedLinear]] = {}
    for each in linears:
        if each.block is not None and not each.is_expert:
            groups.setdefault(each.fused_group, {})[each.module.rpartition(".")[2]] = each
    for group, members in groups.items():
        ordered = [members.get(name) for name in _list_parts(group)]
        held = [each for each in ordered if each is not None and each.block is not None]
        if len(held) == len(ordered) > 1 and held[0].block is not None:
            yield _Joined(
                shares=tuple(
                    _Share(
                        module=each.module,
                        stored=each.shape[0],
                        rows=each.shape[0],
                        num_slices=1,
                    )
                    for each in held
                ),
                block=held[0].block[0],
                tp=1,
            )


def _find_linears(
    blocks: Mapping[str, tuple[int, int]], geometry: ModelGeometry
) -> Iterator[tuple[Linear, tuple[int, int]]]:
    for _, linear in geometry.linears():
        stored = linear.checkpoint_name
        block = blocks.get(stored.removesuffix(".weight") if stored else linear.module)
        if block is not None and not linear.num_experts and linear.section != "other":
            yield linear, block


def _explain_cut(linear: Linear, block: tuple[int, int], tp: int) -> str:
    """Say how the cut of a linear that is loaded alone goes through a block; empty if not."""
    if linear.shard == "row":
        size, side, length = len(rank_range(linear.in_features, tp, 0)), "inputs", block[1]
    elif linear.shard == "column" and len(linear.parts) == 1 and not _is_joined(linear):
        size, side, length = _count_rows(linear.parts[0], tp), "outputs", block[0]
    else:
        return ""
    if size % length == 0:
        return ""
    what = f"{linear.module} has {size} {side} on each of {tp} ranks"
    return f"{what}, no multiple of {length}: ValueError"


def _join_on_ranks(found: Collection[tuple[Linear, tuple[int, int]]], tp: int) -> Iterator[_Joined]:
    """Gather what is loaded into one weight: parts of a stored weight, and stored weights."""
    groups: dict[str, dict[str, _Share]] = {}
    length_of: dict[str, int] = {}
    for linear, (length, _) in found:
        if linear.shard != "column":
            continue
        if len(linear.parts) > 1:
            shares = (_share(part, linear.logical(part), tp) for part in linear.parts)
            yield _Joined(shares=tuple(shares), block=length, tp=tp, is_stored_joined=True)
        elif _is_joined(linear):
            group, (_, _, name) = name_fused_group(linear.module), linear.module.rpartition(".")
            groups.setdefault(group, {})[name] = _share(linear.parts[0], linear.module, tp)
            length_of[group] = length
    for group, members in groups.items():
        ordered = (members[name] for name in _list_parts(group) if name in members)
        yield _Joined(shares=tuple(ordered), block=length_of[group], tp=tp)


def _share(part: Part, module: str, tp: int) -> _Share:
    return _Share(
        module=module,
        stored=part.count * part.unit,
        rows=_count_rows(part, tp),
        num_slices=min(tp, part.count),
    )


def _list_parts(group: str) -> list[str]:
    return group.rpartition(".")[2].split("+")


def _is_joined(linear: Linear) -> bool:
    return len(_list_parts(name_fused_group(linear.module))) > 1


def _count_rows(part: Part, tp: int) -> int:
    return part.unit * len(rank_range(part.count, tp, 0))
