"""What engines do with FP8 weights that are stored as they should be: rules, and split blocks.

A block of 128 x 128 weights has one scale. vLLM and SGLang load q, k and v, or gate and up, into
one weight, and give each rank a slice of its rows or columns. Where a slice ends inside a block
they stop, or give rows the scale of another block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.declared import find_modelopt_section
from fp8calib.engines.replay.verdicts import Finding
from fp8calib.engines.status import Status
from fp8calib.engines.weights.linears import LinearGroup, StoredLinear
from fp8calib.engines.weights.rules import WeightRule
from fp8calib.engines.weights.stored import OpenedWeights
from fp8calib.errors import shorten
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.model.geometry import Linear
from fp8calib.model.module_paths import name_fused_group
from fp8calib.model.tensor_parallel import rank_range
from fp8calib.numerics.schemes import Granularity, find_nearest

_MIN_FINER_BLOCK = 32
"""vLLM 0.32.0 layers/fused_moe/oracle/fp8.py (refine_fp8_moe_block_shape)."""
_DIALECTS = ("compressed-tensors", "autofp8", "quark", "modelopt", "mxfp8")
"""The dialects whose block scales engines load in this way."""
_SGLANG_FUSED = ("q_proj+k_proj+v_proj", "gate_proj+up_proj", "w1+w3")
"""The groups whose blocks SGLang checks."""
_ROW_EXPERTS = ("down_proj", "w2")
"""Projections of experts that ranks split by inputs; they split the others by outputs."""
_MIXER_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_MIXER_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_MIXER_STATES = ("mamba_d_state", "ssm_state_size")
_REPEATS_SCALES = "the scales of experts are repeated for smaller blocks"
_FIX = "quantize with one scale per tensor or per channel"
_RANKS_FIX = f"serve it with fewer ranks, or {_FIX}"
_EXPERTS_FIX = f"serve it with expert parallelism or fewer ranks, or {_FIX}"


def apply_rules(
    rules: Iterable[WeightRule], stored: OpenedWeights, groups: Sequence[LinearGroup]
) -> Iterator[Finding]:
    """List what the rules of an engine's record say about FP8 weights."""
    config = stored.folder.config
    model_type = config.get("model_type")
    experts = {each.module for group in groups if group.kind == "experts" for each in group.members}
    held = {each.module: each.tensors for group in groups for each in group.members}
    names = {each: find_nearest(each).name for each in set(stored.schemes.values())}
    # ModelOpt's MIXED_PRECISION, for which engines have a separate method
    sections = (config.get("quantization_config"), stored.folder.modelopt)
    inner = [find_modelopt_section(each) for each in sections if isinstance(each, dict)]
    is_mixed = any(each.get("quant_algo") == "MIXED_PRECISION" for each in inner)
    for rule in rules:
        if (
            rule.dialect not in ("", stored.dialect)
            or (rule.model_types and model_type not in rule.model_types)
            or model_type in rule.except_model_types
        ):
            continue
        excepted = rule.not_mixed if is_mixed else ()
        for module, scheme in stored.schemes.items():
            if (
                (not rule.schemes or names[scheme] in rule.schemes)
                and names[scheme] not in excepted
                and (not rule.endings or module.endswith(rule.endings))
                and (not rule.has_experts or module in experts)
                and (not rule.beside or rule.beside in held.get(module, ()))
                and rule.granularity in (None, scheme.weights)
                and not (rule.splits_heads and _holds_whole_heads(stored, scheme))
            ):
                why = f"{model_type}: {rule.why}" if rule.model_types else rule.why
                if rule.has_experts or rule.endings:
                    why = f"{why} ({shorten(module)})"
                if options := " ".join(f"--ignore '{pattern}'" for pattern in rule.ignore):
                    why = f"{why}; {options} leaves them unquantized"
                yield Finding(status=rule.status, why=why, fix=rule.fix)
                break


def _holds_whole_heads(stored: OpenedWeights, scheme: StoredScheme) -> bool:
    attentions = (attention for _, attention in stored.geometry.attentions())
    return all(scheme.block[0] % attention.k_head_dim == 0 for attention in attentions)


def list_block_findings(
    release: Release, stored: OpenedWeights, groups: Sequence[LinearGroup], tp: int
) -> Iterator[Finding]:
    """List blocks that an engine splits by fusing projections, or by sharding over `tp` ranks.

    Sources: vLLM 0.32.0 layers/linear.py, quantization/utils/fp8_utils.py
    (validate_fp8_block_shape); SGLang 0.5.23 layers/quantization/fp8_utils.py, fp8.py
    (validate_fp8_block_shape).
    """
    if stored.dialect not in _DIALECTS:
        return
    schemes = stored.schemes.items()
    blocks = {path: each.block for path, each in schemes if each.weights is Granularity.BLOCK}
    is_autofp8, engine = stored.dialect == "autofp8", release.key
    repeats = is_autofp8 and engine == "vllm" and release.has(_REPEATS_SCALES)
    experts = (
        _judge_expert(each, blocks[each.module], tp, repeats=repeats)
        for group in groups
        for each in group.members
        if group.kind == "experts" and each.module in blocks
    )
    yield from islice(filter(None, experts), 1)
    known = {
        (linear.checkpoint_name or linear.module).removesuffix(".weight"): linear
        for _, linear in stored.geometry.linears()
        if linear.section != "other" and not linear.num_experts
    }
    single: list[Finding] = []
    fused: list[Finding] = []
    for group in groups:
        if group.kind == "experts" or any(each.module not in blocks for each in group.members):
            continue
        first, *others = group.members
        block, linear = blocks[first.module], known.get(first.module)
        pieces = _list_pieces(group, known, tp)
        if engine == "vllm" and not others:
            pieces = _split_mixer(stored.folder.config, first) or pieces
        if len(pieces) > 1:
            fused += _judge_fused(engine, pieces, block[0], tp, is_autofp8=is_autofp8)
        elif tp > 1 and not others and linear is not None:  # ranks split it
            is_row = linear.shard == "row"
            outputs = pieces[0][1] if pieces else 0
            size = len(rank_range(linear.in_features, tp, 0)) if is_row else outputs
            if size % block[is_row]:
                what = f"{linear.module} has {size} {'inputs' if is_row else 'outputs'}"
                why = f"{what} on each of {tp} ranks, no multiple of {block[is_row]}: ValueError"
                single.append(Finding(status=Status.REFUSED, why=why, fix=_RANKS_FIX))
    yield from (single or fused)[:1]


def _list_pieces(group: LinearGroup, known: Mapping[str, Linear], tp: int) -> list[tuple[str, int]]:
    """List the projections in a weight with their outputs on a rank; none if ranks split inputs."""
    pieces: list[tuple[str, int]] = []
    for member in group.members:
        linear = known.get(member.module)
        if linear is None or (len(linear.parts) == 1 and tp == 1):
            pieces.append((member.module, member.shape[0]))
        elif linear.shard == "column":
            rows = (each.unit * len(rank_range(each.count, tp, 0)) for each in linear.parts)
            pieces += zip(map(linear.logical, linear.parts), rows, strict=True)
    return pieces


def _judge_fused(
    engine: str, pieces: Sequence[tuple[str, int]], length: int, tp: int, *, is_autofp8: bool
) -> Iterator[Finding]:
    """Judge projections that an engine loads into one weight: one may end inside a block.

    On one rank the last one may, but for SGLang's quant_method fp8.
    """
    is_sglang = engine == "sglang"
    if is_sglang and name_fused_group(pieces[0][0]).rpartition(".")[2] not in _SGLANG_FUSED:
        return
    checked = pieces if tp > 1 or (is_sglang and is_autofp8) else pieces[:-1]
    split = next((each for each in checked if each[1] % length), None)
    if split is None:
        return
    where = f" on each of {tp} ranks" if tp > 1 else ""
    why = f"{split[0]} has {split[1]} outputs{where}, no multiple of {length}, and is fused"
    fix, status = _FIX if tp == 1 else _RANKS_FIX, Status.REFUSED
    if is_autofp8 and not is_sglang:
        # vLLM 0.32.0 layers/linear.py (_maybe_allow_fp8_block_shape_mismatch)
        why, status = f"{why}: it stops, or rows get the scales of other blocks", Status.MISREAD
    yield Finding(status=status, why=why, fix=fix)


def _judge_expert(
    linear: StoredLinear, block: tuple[int, int], tp: int, *, repeats: bool
) -> Finding | None:
    """Judge a projection of an expert that ends inside a block, whole or on a rank.

    Engines load the scales of all experts of a layer into one tensor of whole blocks.
    """
    is_row = linear.projection in _ROW_EXPERTS
    if tp == 1 and (is_row or "+" not in name_fused_group(linear.module)):
        return None
    size, length = linear.shape[int(is_row)], block[int(is_row)]
    if size % (tp * length) == 0:
        return None
    side = "inputs" if is_row else "outputs"
    where = f" on each of {tp} ranks" if tp > 1 else ""
    why = f"{linear.module} has {size / tp:g} {side}{where}, no multiple of {length}"
    # As in vLLM 0.32.0: a size of at least 32 that divides the blocks, both sides of the weight,
    # and a rank's slice of the side that is split.
    finer = 0 if size % tp else math.gcd(*block, size // tp, linear.shape[int(not is_row)])
    if not repeats or finer < _MIN_FINER_BLOCK:
        fix = _FIX if tp == 1 else _EXPERTS_FIX
        return Finding(status=Status.REFUSED, why=f"{why}: ValueError", fix=fix)
    why += f": it repeats the scales for blocks of {finer}, which only its Triton kernels on GPUs"
    return Finding(status=Status.USED, why=f"{why} support", fix=_FIX)


def _split_mixer(config: Mapping[str, object], linear: StoredLinear) -> list[tuple[str, int]]:
    """Split `in_proj` of a Mamba-2 mixer: z and x, the states B and C of all groups, and dt.

    vLLM 0.32.0 makes five projections of it (`layers/mamba/mamba_mixer2.py`); run.
    """
    text = config.get("text_config")
    sections = (config, text if isinstance(text, dict) else {})
    heads, groups, states = (
        next((n for each in sections for key in keys if isinstance(n := each.get(key), int)), 0)
        for keys in (_MIXER_HEADS, _MIXER_GROUPS, _MIXER_STATES)
    )
    inner = linear.shape[0] - heads - 2 * groups * states
    if linear.projection != "in_proj" or min(inner, heads) <= 0:
        return []
    sizes = (inner // 2, inner // 2, groups * states, groups * states, heads)
    return [(linear.module, size) for size in sizes]
