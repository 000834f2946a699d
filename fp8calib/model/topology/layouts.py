"""How projections are sharded, by name, and how fused weights are laid out, by family.

The facts are from transformers' modeling files. The order of rows in a fused q/k/v weight differs
between families and cannot be derived from its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8calib.geometry.model_geometry import Part, Shard

ATTENTION_SHARDS: dict[str, Shard] = {
    "q_proj": "column",
    "k_proj": "column",
    "v_proj": "column",
    "q_b_proj": "column",
    "kv_b_proj": "column",
    "q_a_proj": "replicated",
    "kv_a_proj_with_mqa": "replicated",
    "o_proj": "row",
    "out_proj": "row",
    "dense": "row",
    "c_proj": "row",
    "wo": "row",
}
"""Projections of attention modules that are not fused."""

FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")

MLP_SHARDS: dict[str, Shard] = {
    "gate_proj": "column",
    "up_proj": "column",
    "down_proj": "row",
    "w1": "column",
    "w3": "column",
    "w2": "row",
    "fc1": "column",
    "fc2": "row",
    "c_fc": "column",
    "c_proj": "row",
    "fc_in": "column",
    "fc_out": "row",
    "dense_h_to_4h": "column",
    "dense_4h_to_h": "row",
    "gate_up_proj": "column",
    "input_linear": "column",
    "output_linear": "row",
}
FUSED_GATE_UP = ("gate_up_proj", "input_linear")

CONTIGUOUS_QKV = frozenset(
    {"phi3", "phi4_multimodal", "gpt2", "gpt_bigcode", "mpt", "dbrx", "imagegpt"}
)
"""Rows are [all q; all k; all v]."""
INTERLEAVED_QKV = frozenset(
    {"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon-per-head"}
)
"""Rows are q, k, v of head 0, then of head 1, and so on."""

PRESCALED_QUERY = frozenset({"opt"})
"""Families that multiply q by head_dim ** -0.5 before attention; engines do it inside."""

CACHELESS_MIXERS = (
    "mamba",
    "deltanet",
    "gateddelta",
    "kimidelta",
    "shortconv",
    "recurrent",
    "rwkv",
    "linearattention",
    "lightning",
    "ssm",
)
"""Substrings of lower-case class names of token mixers that have a state instead of K and V."""
CACHELESS_LAYER_TYPES = frozenset({"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Head counts and sizes of one attention module."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int


def heads_part(name: str, num_heads: int, out_features: int) -> Part:
    """Describe a projection whose rows are `num_heads` contiguous heads of equal size."""
    return Part(name=name, count=num_heads, unit=out_features // num_heads, per_group=num_heads)


def rows_part(name: str, num_rows: int, *, first: int = 0) -> Part:
    """Describe a projection of `num_rows` contiguous rows."""
    return Part(name=name, count=num_rows, unit=1, first=first, per_group=num_rows)


def gate_up_parts(out_features: int, *, interleaved: bool = False) -> tuple[Part, Part]:
    """Describe a fused gate/up weight: [gate; up], or gate and up row by row (gpt_oss)."""
    half = out_features // 2
    if not interleaved:
        return rows_part("gate_proj", half), rows_part("up_proj", half, first=half)
    gate, up = (
        Part(name=name, count=half, unit=1, first=first, per_group=1, group_stride=2)
        for name, first in (("gate_proj", 0), ("up_proj", 1))
    )
    return gate, up


def contiguous_qkv(heads: Heads) -> tuple[Part, Part, Part]:
    """Describe [all q; all k; all v]."""
    size, num_q, num_kv = heads.k_head_dim, heads.num_heads, heads.num_kv_heads
    firsts = (0, num_q * size, (num_q + num_kv) * size)
    counts = (num_q, num_kv, num_kv)
    q, k, v = (
        Part(name=name, count=count, unit=size, first=first, per_group=count)
        for name, count, first in zip(("q_proj", "k_proj", "v_proj"), counts, firsts, strict=True)
    )
    return q, k, v


def grouped_qkv(heads: Heads) -> tuple[Part, Part, Part]:
    """Describe [q heads; k; v] per KV head; with one q head each it is GPT-NeoX's layout."""
    size, groups = heads.k_head_dim, heads.num_kv_heads
    per_group = heads.num_heads // groups
    stride = (per_group + 2) * size
    q = Part(
        name="q_proj",
        count=heads.num_heads,
        unit=size,
        per_group=per_group,
        group_stride=stride,
    )
    k, v = (
        Part(name=name, count=groups, unit=size, first=first, per_group=1, group_stride=stride)
        for name, first in (
            ("k_proj", per_group * size),
            ("v_proj", (per_group + 1) * size),
        )
    )
    return q, k, v
