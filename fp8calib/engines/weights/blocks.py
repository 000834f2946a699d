"""Blocks of FP8 weights that engines split when they fuse projections or shard them over ranks.

A block of 128 x 128 weights has one scale. vLLM and SGLang load q, k and v, or gate and up, into
one weight, and give each rank a slice of its rows or columns. Where a slice ends inside a block
they stop, or give rows the scale of another block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fp8calib.engines.status import Status
from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.rules import QuantizedLinear, QuantizedWeights
from fp8calib.model.module_paths import name_fused_group
from fp8calib.model.shapes import Linear, ModelGeometry, Part
from fp8calib.model.tensor_parallel import rank_range

_ENGINES = ("vllm", "sglang")
"""vLLM 0.32.0 layers/linear.py, quantization/utils/fp8_utils.py (validate_fp8_block_shape); SGLang
0.5.23 layers/quantization/fp8_utils.py, fp8.py (validate_fp8_block_shape)."""
_MIN_FINER_BLOCK = 32
"""vLLM 0.32.0 layers/fused_moe/oracle/fp8.py (refine_fp8_moe_block_shape)."""
_DIALECTS = ("compressed-tensors", "autofp8", "quark", "modelopt", "mxfp8")
"""The dialects whose block scales engines load in this way."""
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
_STOPS_OR_MISREADS = "it stops, or rows get the scales of other blocks"
"""vLLM 0.32.0 layers/linear.py (_maybe_allow_fp8_block_shape_mismatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A projection in a fused weight."""

    module: str
    rows: int
    """The number of outputs on one rank."""


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


def list_block_findings(
    engine: str,
    weights: QuantizedWeights,
    geometry: ModelGeometry,
    tp: int,
    *,
    repeats_scales: bool = False,
) -> list[Finding]:
    """List blocks that an engine splits by fusing projections, or by sharding over `tp` ranks.

    Args:
        engine: its name.
        weights: of the checkpoint.
        geometry: of the model.
        tp: the number of ranks.
        repeats_scales: it repeats the scales of `autofp8` experts for smaller blocks.
    """
    if weights.dialect not in _DIALECTS or engine not in _ENGINES:
        return []
    blocks = {each.module: each.block for each in weights.linears if each.block is not None}
    found = list(_find_linears(blocks, geometry))
    if tp > 1 and (why := next(filter(None, (_explain_split(*each, tp) for each in found)), "")):
        return [_refuse(why, _RANKS_FIX)]
    fused = [
        *_fuse_by_name(weights.linears),
        *(_split_mixers(weights) if engine == "vllm" else ()),
        *(each for each in _fuse_on_ranks(found, tp) if tp > 1 or each.is_stored_fused),
    ]
    judged = (_judge(engine, each, weights.dialect) for each in fused)
    split = next(filter(None, judged), None)
    experts = _judge_experts(weights, tp, repeats_scales)
    return [*experts, *([] if split is None else [split])]


def _refuse(why: str, fix: str) -> Finding:
    return Finding(status=Status.REFUSED, why=why, fix=fix)


def _judge(engine: str, fused: _FusedWeight, dialect: str) -> Finding | None:
    if engine == "sglang" and fused.group not in _SGLANG_FUSED:
        return None
    split = fused.find_split_block(checks_last=engine == "sglang" and dialect == "autofp8")
    if split is None:
        return None
    where = f" on each of {fused.tp} ranks" if fused.tp > 1 else ""
    why = (
        f"{split.module} has {split.rows} outputs{where}, no multiple of {fused.block}, and is "
        "fused with projections whose blocks then begin elsewhere"
    )
    fix = _FIX if fused.tp == 1 else _RANKS_FIX
    if engine == "sglang" or dialect != "autofp8":
        return _refuse(why, fix)
    return Finding(status=Status.MISREAD, why=f"{why}: {_STOPS_OR_MISREADS}", fix=fix)


def _judge_experts(weights: QuantizedWeights, tp: int, repeats_scales: bool) -> Iterator[Finding]:
    """Judge the first projection of an expert that ends inside a block, whole or on a rank.

    Engines load the scales of all experts of a layer into one tensor of whole blocks.
    """
    split = ((each, _explain_split_expert(each, tp)) for each in weights.linears)
    expert, why = next((found for found in split if found[1]), (None, ""))
    if expert is None:
        return
    repeats = repeats_scales and weights.dialect == "autofp8"
    if repeats and (finer := _find_finer_block(expert, tp)):
        yield Finding(
            status=Status.USED,
            why=f"{why}: it repeats the scales for blocks of {finer}, which only its Triton "
            "kernels on GPUs support",
            fix=_FIX,
        )
    else:
        yield _refuse(f"{why}: ValueError", _FIX if tp == 1 else _EXPERTS_FIX)


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
                members=tuple(_Member(module=each.module, rows=each.shape[0]) for each in held),
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
        members = (_Member(module=linear.module, rows=size) for size in sizes)
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
    return _Member(module=module, rows=_count_rows(part, tp))


def _list_parts(group: str) -> list[str]:
    return group.rpartition(".")[2].split("+")


def _is_fused(linear: Linear) -> bool:
    return len(_list_parts(name_fused_group(linear.module))) > 1


def _count_rows(part: Part, tp: int) -> int:
    return part.unit * len(rank_range(part.count, tp, 0))
