"""Which heads, rows and channels each tensor-parallel rank owns.

The split is that of Megatron-style engines (vLLM `model_executor/layers/linear.py`): contiguous,
equal parts. KV heads are replicated if there are fewer than ranks.
"""

from __future__ import annotations

from fp8calib.errors import UsageError
from fp8calib.model.geometry import Linear, ModelGeometry, Part


def rank_range(count: int, tp: int, rank: int) -> range:
    """Give the units, of `count`, that `rank` of `tp` owns; one shared unit if they are too few."""
    if count < tp:
        owned = rank * count // tp
        return range(owned, owned + 1)
    return range(rank * count // tp, (rank + 1) * count // tp)


def check_heads(geometry: ModelGeometry, tp: int) -> None:
    """Refuse a degree that does not fit the heads of attention.

    It must divide the attention heads, and divide the KV heads or be a multiple of them. Every rank
    caches the whole latent of latent attention, so that has no KV heads to divide.
    """
    for layer, attention in geometry.attentions():
        heads, kv, fault = attention.num_heads, attention.num_kv_heads, ""
        if tp < 1 or heads % tp:
            fault = f"does not divide the {heads} attention heads of layer {layer.index}"
        elif attention.kind == "heads" and kv % tp and tp % kv:
            fault = f"and the {kv} KV heads of layer {layer.index}: neither divides the other"
        if fault:
            hint = f"use a divisor of {heads}, which divides the KV heads or is a multiple of them"
            raise UsageError(f"--tp {tp} {fault}", hint=hint)


def check_linears(geometry: ModelGeometry, tp: int, *, of_stats: bool = True) -> None:
    """Refuse a degree that does not split every attention and MLP weight into equal parts.

    With `of_stats` also one that splits the blocks of experts' channels that statistics keep.
    """
    for layer, linear in geometry.linears():
        counts: list[tuple[int, str]] = []
        if linear.section != "other" and linear.shard == "row":
            counts = [(linear.in_features, "channels")]
        elif linear.section == "mlp" and linear.shard == "column":
            counts = [(part.count, "channels") for part in linear.parts]
        if of_stats and counts and linear.num_experts:
            blocks = f"blocks of {linear.expert_block} channels per expert in the stats"
            counts.append((_count_blocks(linear), blocks))
        for count, what in counts:
            if count % tp:
                raise UsageError(
                    f"--tp {tp} does not divide the {count} {what} of {linear.module} (layer "
                    f"{layer.index})",
                    hint=f"use a divisor of {count}",
                )


def owned_rows(linear: Linear, part: Part, tp: int, rank: int) -> list[int]:
    """List the output rows of `part` that `rank` owns."""
    if linear.shard == "column":
        return part.rows(rank_range(part.count, tp, rank))
    return part.rows(range(part.count))


def owned_channels(linear: Linear, tp: int, rank: int) -> range:
    """List the input channels of `linear` that `rank` owns."""
    if linear.shard == "row":
        return rank_range(linear.in_features, tp, rank)
    return range(linear.in_features)


def owned_blocks(linear: Linear, tp: int, rank: int) -> range:
    """List the blocks that `rank` owns on the split axis of an expert's projection."""
    return rank_range(_count_blocks(linear), tp, rank)


def _count_blocks(linear: Linear) -> int:
    num_channels = linear.in_features if linear.shard == "row" else linear.out_features
    return num_channels // linear.expert_block
