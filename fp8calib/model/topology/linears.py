"""Find the linear projections of a decoder layer, including those of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8calib.errors import ModelError
from fp8calib.model.shapes import Attention, Linear, Part, Section, Shard
from fp8calib.model.topology.layouts import (
    ATTENTION_SHARDS,
    CONTIGUOUS_QKV,
    FUSED_GATE_UP,
    FUSED_QKV,
    INTERLEAVED_QKV,
    MLP_SHARDS,
    contiguous_qkv,
    gate_up_parts,
    grouped_qkv,
    heads_part,
    rows_part,
)
from fp8calib.model.topology.search import (
    GeometrySearch,
    is_linear,
    is_matrix,
    linear_features,
)

_MOST_BLOCKS = 256


def find_linears(
    search: GeometrySearch, attention: Attention | None, path: str, block: nn.Module
) -> Iterator[Linear]:
    """Find every linear of a layer; weights that cannot be observed are added to `search`.

    Raises:
        ModelError: the order of rows in a fused q/k/v is not known.
    """
    for name, module in block.named_modules():
        full = f"{path}.{name}"
        if is_experts(module):
            yield from _expert_linears(path, name, module)
        elif is_linear(module):
            in_features, out_features = linear_features(module)
            section, root, shard, parts = _classify(search, attention, path, name, out_features)
            yield Linear(
                module=full,
                section=section,
                root=root,
                in_features=in_features,
                out_features=out_features,
                shard=shard,
                parts=parts,
                weight_name=f"{full}.weight",
                checkpoint_name=search.checkpoint_names.get(f"{full}.weight"),
            )
        elif heavy := _list_heavy(module, search.config.hidden_size):
            search.unobserved[full] = (
                f"{type(module).__name__} multiplies by {', '.join(heavy)} itself, and uses "
                "neither a linear module nor transformers' experts interface"
            )


def _list_heavy(module: nn.Module, hidden_size: int) -> list[str]:
    """List a module's own parameters that may be stacked experts: 3-D, or 2-D with all rows."""
    if isinstance(module, nn.Embedding) or type(module).__module__.startswith("torch.nn"):
        return []
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if is_matrix(parameter)
        and (parameter.dim() >= 3 or min(parameter.shape) >= hidden_size)  # a router has fewer rows
    ]


def _classify(
    search: GeometrySearch, attention: Attention | None, path: str, name: str, out_features: int
) -> tuple[Section, str, Shard, tuple[Part, ...]]:
    """Give a linear's section, the path that its keys are relative to, its shard and parts."""
    suffix = name.rpartition(".")[2]
    rows = (rows_part(suffix, out_features),)
    if attention is not None and f"{path}.{name}".startswith(f"{attention.module}."):
        root = attention.module
        if suffix in FUSED_QKV and suffix not in ATTENTION_SHARDS:
            return "attention", root, "column", _fused_qkv(search, attention, suffix)
        if suffix not in ATTENTION_SHARDS:
            return "other", root, "replicated", rows
        shard = ATTENTION_SHARDS[suffix]
        if shard == "column":
            is_kv = suffix in {"k_proj", "v_proj"}
            num_heads = attention.num_kv_heads if is_kv else attention.num_heads
            rows = (heads_part(suffix, num_heads, out_features),)
        return "attention", root, shard, rows
    head, _, rest = name.partition(".")
    if suffix in MLP_SHARDS and "attn" not in head and "attention" not in head:
        parts = gate_up_parts(out_features) if suffix in FUSED_GATE_UP else rows
        return "mlp", f"{path}.{head}" if rest else path, MLP_SHARDS[suffix], parts
    return "other", path, "replicated", rows


def _fused_qkv(search: GeometrySearch, attention: Attention, suffix: str) -> tuple[Part, ...]:
    heads = attention.num_heads, attention.num_kv_heads, attention.k_head_dim
    family = search.config.model_type
    if family == "falcon":
        is_grouped = search.config.new_decoder_architecture or not search.config.multi_query
        return grouped_qkv(*heads) if is_grouped else contiguous_qkv(*heads)
    if family == "gpt_bigcode" and not search.config.multi_query:
        return grouped_qkv(*heads)
    if family in CONTIGUOUS_QKV:
        return contiguous_qkv(*heads)
    if family in INTERLEAVED_QKV:
        return grouped_qkv(*heads)
    raise ModelError(
        f"{search.config.model_type}: the order of q, k and v rows inside {attention.module}."
        f"{suffix} is not known (looked for the family in fp8calib.model.topology.layouts)"
    )


def is_experts(module: nn.Module) -> bool:
    """Tell whether transformers runs this module by its experts interface."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "down_proj"))


def _expert_linears(path: str, name: str, module: nn.Module) -> Iterator[Linear]:
    owner: Any = module
    head, _, rest = name.partition(".")
    num_experts, rows, columns = owner.down_proj.shape
    hidden, intermediate = (columns, rows) if owner.is_transposed else (rows, columns)
    fused = "gate_up_proj" if owner.has_gate else "up_proj"
    names = ("gate_proj", "up_proj", "down_proj") if owner.has_gate else ("up_proj", "down_proj")
    for suffix in names:
        is_down = suffix == "down_proj"
        out_features = hidden if is_down else intermediate
        yield Linear(
            module=f"{path}.{name}.{suffix}",
            section="mlp",
            root=f"{path}.{head}" if rest else path,
            in_features=intermediate if is_down else hidden,
            out_features=out_features,
            shard="row" if is_down else "column",
            parts=(rows_part(suffix, out_features),),
            num_experts=int(num_experts),
            expert_block=_expert_block(intermediate),
            weight_name=f"{path}.{name}.{'down_proj' if is_down else fused}",
        )


def _expert_block(intermediate: int) -> int:
    """Choose how many channels share one stored amax per expert.

    The number of blocks divides the intermediate size and is at most 256. Of these numbers, the one
    that most tensor-parallel degrees divide is chosen; of several such, the largest.
    """
    counts = [n for n in range(1, min(intermediate, _MOST_BLOCKS) + 1) if intermediate % n == 0]
    best = max(counts, key=lambda n: (sum(n % tp == 0 for tp in range(1, n + 1)), n))
    return intermediate // best
