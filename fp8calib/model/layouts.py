"""State how projections are sharded, by name, and how fused weights are laid out, by family.

The facts are from transformers' modeling files. The order of rows in a fused q/k/v weight differs
between families and cannot be derived from its shape.
"""

from __future__ import annotations

from typing import Any

from fp8calib.model.geometry import Part, Shard

ATTENTION_SHARDS: dict[str, Shard] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), "column"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "replicated"),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "c_proj", "wo"), "row"),
}
"""Projections of attention modules that are not fused."""

FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")

FUSED_GATE_UP = ("gate_up_proj", "input_linear")
MLP_SHARDS: dict[str, Shard] = {
    **dict.fromkeys(("gate_proj", "w1", "up_proj", "w3", *FUSED_GATE_UP), "column"),
    **dict.fromkeys(("fc1", "c_fc", "fc_in", "dense_h_to_4h"), "column"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "c_proj", "fc_out"), "row"),
    **dict.fromkeys(("dense_4h_to_h", "output_linear"), "row"),
}

_CONTIGUOUS_QKV = frozenset(
    {"phi3", "phi4_multimodal", "gpt2", "gpt_bigcode", "mpt", "dbrx", "imagegpt"}
)
"""Rows are [all q; all k; all v]."""
_INTERLEAVED_QKV = frozenset(
    {"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon-per-head"}
)
"""Rows are q, k, v of head 0, then of head 1, and so on."""

PRESCALED_QUERY = frozenset({"opt"})
"""Families that multiply q by head_dim ** -0.5 before attention; engines do it inside."""

CACHELESS_MIXERS = (
    "mamba",
    "deltanet",
    "gateddelta",
    "deltaattention",
    "shortconv",
    "recurrent",
    "rwkv",
    "linearattention",
    "lightning",
    "ssm",
)
"""Substrings of lower-case class names of token mixers that have a state instead of K and V.

A family's own name is not searched: KimiLinearAttention and RecurrentGemmaAttention cache K and V.
"""
CACHELESS_LAYER_TYPES = frozenset({"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"})


def gate_up_parts(out_features: int, *, interleaved: bool = False) -> tuple[Part, Part]:
    """Describe a fused gate/up weight: [gate; up], or gate and up row by row (gpt_oss)."""
    half = out_features // 2
    per_group, stride = (1, 2) if interleaved else (half, 0)
    gate, up = (
        Part(name=name, count=half, unit=1, first=first, per_group=per_group, group_stride=stride)
        for name, first in (("gate_proj", 0), ("up_proj", per_group))
    )
    return gate, up


def qkv_parts(config: Any, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Part, ...]:
    """Describe the rows of a fused q/k/v weight; empty if their order is not known."""
    family = config.model_type
    is_grouped = family in _INTERLEAVED_QKV
    if family == "falcon":
        is_grouped = config.new_decoder_architecture or not config.multi_query
    elif family == "gpt_bigcode":
        is_grouped = not config.multi_query
    elif family not in _CONTIGUOUS_QKV | _INTERLEAVED_QKV:
        return ()
    # [q heads; k; v] per KV head; with one q head per KV head it is GPT-NeoX's layout
    groups = num_kv_heads if is_grouped else 1
    num_q, num_kv = num_heads // groups, num_kv_heads // groups
    rows = (("q_proj", num_q, 0), ("k_proj", num_kv, num_q), ("v_proj", num_kv, num_q + num_kv))
    return tuple(
        Part(
            name=name,
            count=per_group * groups,
            unit=head_dim,
            first=first * head_dim,
            per_group=per_group,
            group_stride=(num_q + 2 * num_kv) * head_dim if is_grouped else 0,
        )
        for name, per_group, first in rows
    )
