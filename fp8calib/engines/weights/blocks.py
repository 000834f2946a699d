"""Blocks of FP8 weights that engines split when they fuse projections or shard them over ranks.

A block of 128 x 128 weights has one scale. vLLM and SGLang load q, k and v, or gate and up, into
one weight, and give each rank a slice of its rows or columns. Where a slice ends inside a block
they stop, or give rows the scale of another block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, islice

from fp8calib.engines.weights.faults import (
    QuantizedLinear,
    QuantizedWeights,
    WeightFault,
    fault_per_engine,
)
from fp8calib.engines.weights.weight_rule import Effect
from fp8calib.geometry.model_geometry import Linear, ModelGeometry, Part
from fp8calib.geometry.module_paths import name_fused_group
from fp8calib.geometry.tensor_parallel import rank_range

_SOURCES = {
    "vllm": "vLLM 0.32.0 layers/linear.py, quantization/utils/fp8_utils.py "
    "(validate_fp8_block_shape)",
    "sglang": "SGLang 0.5.23 layers/quantization/fp8_utils.py, fp8.py (validate_fp8_block_shape)",
}
_TGI_SOURCE = "TGI db931fc layers/fp8.py (get_multi_weights_col, w8a8_block_fp8_matmul)"
_SOURCE_FINER = "vLLM 0.32.0 layers/fused_moe/oracle/fp8.py (refine_fp8_moe_block_shape)"
_MIN_FINER_BLOCK = 32
_FINER_SINCE = (0, 29)
"""The first release of vLLM that repeats scales for smaller blocks (`quantization/fp8.py`)."""
_MISMATCH_SINCE = (0, 14)
"""The first one whose `fp8` method lets blocks end inside of a projection
(`layers/linear.py` _maybe_allow_fp8_block_shape_mismatch)."""
_RANKS_DIVIDED_SINCE = (0, 17)
"""The first one that divides sizes by the number of ranks before it counts blocks
(`layers/linear.py` weight_loader_v2)."""
_DIALECTS = ("compressed-tensors", "autofp8", "quark")
"""The dialects whose block scales both engines load in this way."""
_SGLANG_FUSED = ("q_proj+k_proj+v_proj", "gate_proj+up_proj", "w1+w3")
"""The groups that SGLang fuses in every model; it fuses others only in some."""
_ROW_EXPERTS = ("down_proj", "w2")
"""Projections of experts that ranks split by inputs; they split the others by outputs."""
_MIXER_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_MIXER_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_MIXER_STATES = ("mamba_d_state", "ssm_state_size")
_FIX = "quantize with one scale per tensor or per channel"
_RANKS_FIX = f"serve it with fewer ranks, or {_FIX}"
_EXPERTS_FIX = f"serve it with expert parallelism or fewer ranks, or {_FIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A projection in a fused weight; two are equal where their sizes are."""

    module: str = field(compare=False)
    stored: int
    """The number of outputs in the checkpoint."""
    rows: int
    """The number of outputs on one rank."""
    num_slices: int
    """The number of ranks with different rows; the other ranks repeat them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedWeight:
    """Projections that an engine loads into one weight, in order."""

    members: tuple[_Member, ...]
    block: int
    tp: int
    is_stored_fused: bool = False
    """The checkpoint stores them as one weight too, with blocks across the borders."""

    @property
    def group(self) -> str:
        """The names of the projections, joined by +."""
        return name_fused_group(self.members[0].module).rpartition(".")[2]

    def find_split_block(self, *, checks_last: bool) -> _Member | None:
        """Find a projection that ends inside a block; on one rank the last one may."""
        checked = self.members if checks_last or self.tp > 1 else self.members[:-1]
        return next((member for member in checked if member.rows % self.block), None)


def list_fused_block_faults(weights: QuantizedWeights) -> list[WeightFault]:
    """List blocks that fusing projections splits on one rank."""
    if weights.dialect not in _DIALECTS:
        return []
    return [
        *_judge_experts(weights, 1, _FIX),
        *_judge(_fuse_by_name(weights.linears), weights.dialect),
        *(
            each
            for each in _judge(_split_mixers(weights), weights.dialect)
            if each.engine == "vllm"
        ),
    ]


def list_rank_block_faults(
    weights: QuantizedWeights, geometry: ModelGeometry, tp: int
) -> list[WeightFault]:
    """List blocks that sharding over `tp` ranks splits.

    Weights that the checkpoint stores fused are checked on one rank too.
    """
    if weights.dialect not in _DIALECTS:
        return []
    blocks = {each.module: each.block for each in weights.linears if each.block is not None}
    found = list(_find_linears(blocks, geometry))
    if tp > 1 and (why := next(filter(None, (_explain_split(*each, tp) for each in found)), "")):
        sources = _SOURCES | ({"tgi": _TGI_SOURCE} if weights.dialect == "autofp8" else {})
        return list(fault_per_engine(sources, Effect.REFUSED, why, _RANKS_FIX))
    fused = _fuse_on_ranks(found, tp)
    return [
        *(_judge_experts(weights, tp, _EXPERTS_FIX) if tp > 1 else ()),
        *_judge((each for each in fused if tp > 1 or each.is_stored_fused), weights.dialect),
    ]


def _judge(fused: Iterable[_FusedWeight], dialect: str) -> Iterator[WeightFault]:
    """Yield the first fault of each engine."""
    every = list(fused)
    for engine in _SOURCES:
        yield from islice(filter(None, (_judge_one(engine, each, dialect) for each in every)), 1)
    if dialect == "autofp8":
        yield from _judge_older(every)
    if dialect == "autofp8":
        yield from islice(filter(None, map(_judge_joined, every)), 1)


def _judge_older(every: Iterable[_FusedWeight]) -> Iterator[WeightFault]:
    """Judge vLLM before it let blocks of the `fp8` method end inside of a projection."""
    found = (_make_fault("vllm", each, Effect.REFUSED, checks_last=False) for each in every)
    fault = next(filter(None, found), None)
    if fault is None:
        return
    yield replace(fault, until=_MISMATCH_SINCE)
    if any(each.tp > 1 for each in every):
        yield replace(
            fault,
            effect=Effect.CONDITION,
            why=f"{fault.why}: what it copies is judged by the rules of vLLM 0.17",
            since=_MISMATCH_SINCE,
            until=_RANKS_DIVIDED_SINCE,
        )


def _judge_joined(fused: _FusedWeight) -> WeightFault | None:
    """Judge TGI, which joins the scales of all projections, whatever rows they cover.

    Of projections that are stored as one weight it looks for the scale of a tensor.
    """
    if fused.is_stored_fused:
        return WeightFault(
            engine="tgi",
            effect=Effect.REFUSED,
            why=f"{fused.members[0].module} joins projections, for which it reads no blocks: it "
            "looks for weight_scale, and stops (RuntimeError)",
            source="TGI db931fc layers/fp8.py (get_weights_col_packed)",
            fix=_FIX,
        )
    odd = next((m for m in fused.members if math.ceil(m.stored / fused.block) % fused.tp), None)
    split = odd or fused.find_split_block(checks_last=False)
    if split is None:
        return None
    counts = [math.ceil(member.rows / fused.block) for member in fused.members]
    rows = sum(member.rows for member in fused.members)
    is_refused = odd is not None or sum(counts) != math.ceil(rows / fused.block)
    end = "it stops" if is_refused else "rows get the scales of other blocks"
    return WeightFault(
        engine="tgi",
        effect=Effect.REFUSED if is_refused else Effect.MISREAD,
        why=f"{split.module} has {split.rows} outputs, no multiple of {fused.block}, and is joined "
        f"with other projections: {end}",
        source=_TGI_SOURCE,
        fix=_FIX if fused.tp == 1 else _RANKS_FIX,
    )


def _judge_one(engine: str, fused: _FusedWeight, dialect: str) -> WeightFault | None:
    if engine == "sglang" and fused.group not in _SGLANG_FUSED:
        return None
    checks_last = engine == "sglang" and dialect == "autofp8"
    if engine != "vllm" or dialect != "autofp8":
        return _make_fault(engine, fused, Effect.REFUSED, checks_last=checks_last)
    if fused.find_split_block(checks_last=False) is None:
        return None
    effect = _copy_scales(fused)  # its `_maybe_allow_fp8_block_shape_mismatch`
    if effect is None:
        return None
    fault = _make_fault(engine, fused, effect, checks_last=False)
    return None if fault is None else replace(fault, since=_MISMATCH_SINCE)


def _make_fault(
    engine: str, fused: _FusedWeight, effect: Effect, *, checks_last: bool
) -> WeightFault | None:
    split = fused.find_split_block(checks_last=checks_last)
    if split is None:
        return None
    where = f" on each of {fused.tp} ranks" if fused.tp > 1 else ""
    what = "is fused with projections whose blocks then begin elsewhere"
    end = ": rows get the scales of other blocks" if effect is Effect.MISREAD else ""
    return WeightFault(
        engine=engine,
        effect=effect,
        why=f"{split.module} has {split.rows} outputs{where}, no multiple of {fused.block}, and "
        f"{what}{end}",
        source=_SOURCES[engine],
        fix=_FIX if fused.tp == 1 else _RANKS_FIX,
    )


@cache
def _copy_scales(fused: _FusedWeight) -> Effect | None:
    """Replay how vLLM's `fp8` method copies scales where it does not check the sizes.

    Weights of equal sizes are replayed once.

    Returns:
        REFUSED where a slice is outside of a tensor, MISREAD where a row gets the scale of another
        block, None where all rows get their own.
    """
    block, members = fused.block, fused.members
    begins = [0, *accumulate(member.rows for member in members)]
    num_scales = math.ceil(begins[-1] / block)
    stored_begins = [0, *accumulate(member.stored for member in members)]
    stored_counts = [math.ceil(member.stored / block) for member in members]
    stored_scales = [0, *accumulate(stored_counts)]
    if fused.is_stored_fused and stored_scales[-1] > math.ceil(stored_begins[-1] / block):
        return Effect.REFUSED
    is_misread = False
    for rank in range(fused.tp):
        held: list[int | None] = [None] * num_scales
        for number, member in enumerate(members):
            first, count = math.ceil(begins[number] / block), math.ceil(member.rows / block)
            start = rank * member.num_slices // fused.tp * count
            if first + count > num_scales or start + count > stored_counts[number]:
                return Effect.REFUSED
            begin = stored_scales[number] + start
            held[first : first + count] = range(begin, begin + count)
        for number, member in enumerate(members):
            slice_begin = rank * member.num_slices // fused.tp * member.rows
            for row in range(member.rows):
                meant = (
                    (stored_begins[number] + slice_begin + row) // block
                    if fused.is_stored_fused
                    else stored_scales[number] + (slice_begin + row) // block
                )
                is_misread |= held[(begins[number] + row) // block] != meant
    return Effect.MISREAD if is_misread else None


def _judge_experts(weights: QuantizedWeights, tp: int, fix: str) -> Iterator[WeightFault]:
    """Judge the first projection of an expert that ends inside a block, whole or on a rank.

    Engines load the scales of all experts of a layer into one tensor of whole blocks.
    """
    split = ((each, _explain_split_expert(each, tp)) for each in weights.linears)
    expert, why = next((found for found in split if found[1]), (None, ""))
    if expert is None:
        return
    finer = _find_finer_block(expert, tp) if weights.dialect == "autofp8" else 0
    for fault in fault_per_engine(_SOURCES, Effect.REFUSED, f"{why}: ValueError", fix):
        if fault.engine == "vllm" and finer:
            yield replace(fault, until=_FINER_SINCE)
            yield replace(
                fault,
                since=_FINER_SINCE,
                effect=Effect.CONDITION,
                why=f"{why}: it repeats the scales for blocks of {finer}, which only its Triton "
                "kernels on GPUs support",
                source=_SOURCE_FINER,
            )
        else:
            yield fault


def _explain_split_expert(linear: QuantizedLinear, tp: int) -> str:
    """Say where a projection of an expert ends inside a block; empty where it does not."""
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
    """Find the smaller blocks for which vLLM's `fp8` method repeats an expert's scales; 0 if none.

    As in vLLM 0.32.0: a size of at least 32 that divides the blocks, both sides of the weight, and
    a rank's slice of the side that is split.
    """
    is_row = linear.module.endswith(_ROW_EXPERTS)
    split, whole = linear.shape[int(is_row)], linear.shape[int(not is_row)]
    if linear.block is None or split % tp:
        return 0
    size = math.gcd(*linear.block, split // tp, whole)
    return size if size >= _MIN_FINER_BLOCK else 0


def _fuse_by_name(linears: Collection[QuantizedLinear]) -> Iterator[_FusedWeight]:
    groups: dict[str, dict[str, QuantizedLinear]] = {}
    for each in linears:
        if each.block is not None and not each.is_expert:
            groups.setdefault(each.fused_group, {})[each.module.rpartition(".")[2]] = each
    for group, members in groups.items():
        ordered = [members.get(name) for name in _list_parts(group)]
        held = [each for each in ordered if each is not None and each.block is not None]
        if len(held) == len(ordered) > 1 and held[0].block is not None:
            yield _FusedWeight(
                members=tuple(
                    _Member(
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


def _explain_split(linear: Linear, block: tuple[int, int], tp: int) -> str:
    """Say how sharding a linear that is not fused splits a block; empty where it does not."""
    if linear.shard == "row":
        size, side, length = len(rank_range(linear.in_features, tp, 0)), "inputs", block[1]
    elif linear.shard == "column" and len(linear.parts) == 1 and not _is_fused(linear):
        size, side, length = _count_rows(linear.parts[0], tp), "outputs", block[0]
    else:
        return ""
    if size % length == 0:
        return ""
    what = f"{linear.module} has {size} {side} on each of {tp} ranks"
    return f"{what}, no multiple of {length}: ValueError"


def _fuse_on_ranks(
    found: Collection[tuple[Linear, tuple[int, int]]], tp: int
) -> Iterator[_FusedWeight]:
    """Group what engines fuse: the parts of a stored weight, and stored weights."""
    groups: dict[str, dict[str, _Member]] = {}
    length_of: dict[str, int] = {}
    for linear, (length, _) in found:
        if linear.shard != "column":
            continue
        if len(linear.parts) > 1:
            members = (_make_member(part, linear.logical(part), tp) for part in linear.parts)
            yield _FusedWeight(members=tuple(members), block=length, tp=tp, is_stored_fused=True)
        elif _is_fused(linear):
            group, (_, _, name) = name_fused_group(linear.module), linear.module.rpartition(".")
            groups.setdefault(group, {})[name] = _make_member(linear.parts[0], linear.module, tp)
            length_of[group] = length
    for group, found_members in groups.items():
        ordered = (found_members[name] for name in _list_parts(group) if name in found_members)
        yield _FusedWeight(members=tuple(ordered), block=length_of[group], tp=tp)


def _split_mixers(weights: QuantizedWeights) -> Iterator[_FusedWeight]:
    """Split `in_proj` of Mamba-2 mixers: z and x, the states B and C of all groups, and dt.

    vLLM 0.32.0 makes five projections of it (`layers/mamba/mamba_mixer2.py`); run.
    """
    keys = (_MIXER_HEADS, _MIXER_GROUPS, _MIXER_STATES)
    heads, groups, states = (_find_number(weights.config, names) for names in keys)
    for linear in weights.linears:
        inner = linear.shape[0] - heads - 2 * groups * states
        if linear.block is None or not linear.module.endswith(".in_proj") or min(inner, heads) <= 0:
            continue
        sizes = (inner // 2, inner // 2, groups * states, groups * states, heads)
        members = (
            _Member(module=linear.module, stored=size, rows=size, num_slices=1) for size in sizes
        )
        yield _FusedWeight(
            members=tuple(members), block=linear.block[0], tp=1, is_stored_fused=True
        )


def _find_number(config: Mapping[str, object], keys: Iterable[str]) -> int:
    """Find the first of some numbers in a config or in that of its text part; 0 where none is."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            if isinstance(number := fields.get(key), int):
                return number
    return 0


def _make_member(part: Part, module: str, tp: int) -> _Member:
    return _Member(
        module=module,
        stored=part.count * part.unit,
        rows=_count_rows(part, tp),
        num_slices=min(tp, part.count),
    )


def _list_parts(group: str) -> list[str]:
    return group.rpartition(".")[2].split("+")


def _is_fused(linear: Linear) -> bool:
    return len(_list_parts(name_fused_group(linear.module))) > 1


def _count_rows(part: Part, tp: int) -> int:
    return part.unit * len(rank_range(part.count, tp, 0))
