"""Find the linear projections of a decoder layer, including those of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8calib.errors import ModelError
from fp8calib.geometry.model_geometry import Attention, Linear, Part, Section, Shard
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

MAX_EXPERT_BLOCKS = 256


def find_linears(
    search: GeometrySearch, attention: Attention | None, path: str, block: nn.Module
) -> Iterator[Linear]:
    """Find every linear of a layer; weights that cannot be observed are added to `search`.

    Raises:
        ModelError: the order of rows in a fused q/k/v is not known.
    """
    experts = {name for name, module in block.named_modules() if is_experts(module)}
    for name, module in block.named_modules():
        full = f"{path}.{name}"
        if name in experts:
            yield from _expert_linears(path, name, module)
        elif is_linear(module):
            yield _linear(search, attention, path, name, module)
        elif why := _explain_unobservable(module, search.config.hidden_size):
            search.unobserved[full] = why


def _is_heavy(parameter: nn.Parameter, hidden_size: int) -> bool:
    """Tell whether it may hold stacked experts (3-D, or 2-D with all rows), unlike a router."""
    return is_matrix(parameter) and (parameter.dim() >= 3 or min(parameter.shape) >= hidden_size)


def _explain_unobservable(module: nn.Module, hidden_size: int) -> str:
    """Explain why a module's own weights cannot be observed; empty if it has none."""
    if isinstance(module, nn.Embedding) or type(module).__module__.startswith("torch.nn"):
        return ""
    heavy = [n for n, p in module.named_parameters(recurse=False) if _is_heavy(p, hidden_size)]
    if not heavy:
        return ""
    return (
        f"{type(module).__name__} multiplies by {', '.join(heavy)} itself, and uses neither a "
        "linear module nor transformers' experts interface"
    )


def _linear(
    search: GeometrySearch, attention: Attention | None, path: str, name: str, module: nn.Module
) -> Linear:
    full = f"{path}.{name}"
    in_features, out_features = linear_features(module)
    section, root, shard, parts = _classify(search, attention, path, name, out_features)
    return Linear(
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


_Classified = tuple[Section, str, Shard, tuple[Part, ...]]


def _classify(
    search: GeometrySearch, attention: Attention | None, path: str, name: str, out_features: int
) -> _Classified:
    suffix = name.rpartition(".")[2]
    if attention is not None and f"{path}.{name}".startswith(f"{attention.module}."):
        return _classify_attention(search, attention, suffix, out_features)
    head, _, rest = name.partition(".")
    if suffix in MLP_SHARDS and "attn" not in head and "attention" not in head:
        is_fused = suffix in FUSED_GATE_UP
        parts = gate_up_parts(out_features) if is_fused else (rows_part(suffix, out_features),)
        return "mlp", f"{path}.{head}" if rest else path, MLP_SHARDS[suffix], parts
    return "other", path, "replicated", (rows_part(suffix, out_features),)


def _classify_attention(
    search: GeometrySearch, attention: Attention, suffix: str, out_features: int
) -> _Classified:
    if suffix in FUSED_QKV and suffix not in ATTENTION_SHARDS:
        return "attention", attention.module, "column", _fused_qkv(search, attention, suffix)
    if suffix not in ATTENTION_SHARDS:
        return "other", attention.module, "replicated", (rows_part(suffix, out_features),)
    shard = ATTENTION_SHARDS[suffix]
    if shard != "column":
        return "attention", attention.module, shard, (rows_part(suffix, out_features),)
    is_kv = suffix in {"k_proj", "v_proj"}
    num_heads = attention.num_kv_heads if is_kv else attention.num_heads
    return "attention", attention.module, shard, (heads_part(suffix, num_heads, out_features),)


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
    full = f"{path}.{name}"
    owner: Any = module
    head, _, rest = name.partition(".")
    fused = "gate_up_proj" if owner.has_gate else "up_proj"
    _, rows, columns = owner.down_proj.shape
    hidden, intermediate = (columns, rows) if owner.is_transposed else (rows, columns)
    names = ("gate_proj", "up_proj", "down_proj") if owner.has_gate else ("up_proj", "down_proj")
    block = expert_block(intermediate)
    for suffix in names:
        is_down = suffix == "down_proj"
        weight_name = f"{full}.{'down_proj' if is_down else fused}"
        yield Linear(
            module=f"{full}.{suffix}",
            section="mlp",
            root=f"{path}.{head}" if rest else path,
            in_features=intermediate if is_down else hidden,
            out_features=hidden if is_down else intermediate,
            shard="row" if is_down else "column",
            parts=(rows_part(suffix, hidden if is_down else intermediate),),
            num_experts=int(owner.down_proj.shape[0]),
            expert_block=block,
            weight_name=weight_name,
            checkpoint_name=None,
        )


def expert_block(intermediate: int) -> int:
    """Choose how many channels share one stored amax per expert.

    The number of blocks divides the intermediate size and is at most 256. Of these numbers, the one
    that most tensor-parallel degrees divide is chosen; of several such, the largest.
    """
    counts = [
        n for n in range(1, min(intermediate, MAX_EXPERT_BLOCKS) + 1) if intermediate % n == 0
    ]
    best = max(counts, key=lambda n: (sum(n % tp == 0 for tp in range(1, n + 1)), n))
    return intermediate // best
