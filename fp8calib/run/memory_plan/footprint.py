"""Estimates of the memory of a run, from shapes alone, before any weight is read.

A formula covers what every architecture has: weights, hidden states, the widest tensors of a
layer. What else a layer allocates is measured by the probe (`fp8calib.run.streaming.probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from fp8calib.data.sequences import Batch, find_distinct_tokens
from fp8calib.geometry.model_geometry import Attention, Layer, Linear, ModelGeometry
from fp8calib.geometry.sites import Role
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.streaming.weights import PartSize
from fp8calib.stats.statistic import STATISTICS

SLACK_BYTES = 96 * 2**20
"""Memory outside the formula: arenas of the allocator, threads, code that is loaded late."""
_FLOAT32_BYTES = 4
_LIVE_COPIES = 4
"""How many tensors of a layer's largest width exist at once (gate, up, activation, product)."""
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_FEW_EXPERTS = 8
"""Experts per token, where the config does not state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The batches of a run, as far as they determine its memory."""

    rows: int
    """Sequences of the largest micro-batch, of `columns` tokens each, padding included."""
    columns: int
    num_tokens: int
    """Tokens of all micro-batches, padding included."""
    num_distinct: int
    """Distinct tokens: as many rows of the embedding are read."""
    num_models: int = 1
    """Models whose hidden states are kept between layers: a reference and its candidates."""
    changes_weights: bool = False
    """Whether weights are replaced and restored, layer by layer."""
    changes_inputs: bool = False
    """Whether inputs of linears are quantized."""
    is_padded: bool = False
    """Whether a micro-batch contains padding."""
    num_media_tokens: int = 0
    """Tokens of the rows with media, for which the towers run."""

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Self:
        """Measure the micro-batches of a run of one model."""
        largest = max((batch.input_ids for batch in batches), key=torch.Tensor.numel, default=None)
        rows, columns = (0, 0) if largest is None else largest.shape
        return cls(
            rows=rows,
            columns=columns,
            num_tokens=sum(batch.input_ids.numel() for batch in batches),
            num_distinct=len(find_distinct_tokens(batches)),
            is_padded=any(batch.mask is not None for batch in batches),
            num_media_tokens=sum(
                batch.input_ids.numel() for batch in batches if batch.media is not None
            ),
        )


def peak_of_layers(layers: Sequence[PartSize], *, keep: bool) -> int:
    """Compute the peak bytes of weights while layers are streamed, each next one read ahead.

    With `keep` a layer's stored tensors stay in memory too, to restore changed weights.
    """
    following = [*(layer.stored for layer in layers[1:]), 0]
    return max(
        max(
            (layer.stored + layer.placed if keep else max(layer.stored, layer.placed)) + layer.step,
            layer.placed + ahead + (layer.stored if keep else 0),
        )
        for layer, ahead in zip(layers, following, strict=True)
    )


def hidden_bytes(model: PreTrainedModel, work: Workload, itemsize: int) -> int:
    """Compute the bytes of the hidden states kept between layers."""
    return work.num_tokens * _state_bytes(model, itemsize) * work.num_models


def media_bytes(model: PreTrainedModel, work: Workload, itemsize: int) -> int:
    """Compute the bytes kept of what the towers give: one embedding a token."""
    return work.num_media_tokens * _state_bytes(model, itemsize)


def _state_bytes(model: PreTrainedModel, itemsize: int) -> int:
    return int(_text_config(model).hidden_size) * itemsize


def weights_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Compute the bytes of all parameters and buffers, each counted once."""
    return sum(
        tensor.numel() * (itemsize if tensor.is_floating_point() else tensor.itemsize)
        for tensor in (*model.parameters(), *model.buffers())
    )


def loading_bytes(geometry: ModelGeometry, weights: WeightSource, itemsize: int) -> int:
    """Compute the temporary bytes of transformers while it loads a whole model.

    These are the largest tensor, which it casts, and a second copy of all experts that it joins:
    it reads their tensors ahead in threads (a model of experts alone took twice its weights).
    """
    largest = joined = 0
    for _, linear in geometry.linears():
        size_bytes = linear.in_features * linear.out_features * itemsize
        largest = max(largest, size_bytes)
        if len(weights.tensor_names([linear.weight_name])) > 1:
            joined += size_bytes * max(linear.num_experts, 1)
    return largest + joined


def head_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Compute the bytes of the head's weights."""
    head: Any = model.get_output_embeddings()
    return 0 if head is None else sum(x.numel() * itemsize for x in head.parameters())


def stats_bytes(geometry: ModelGeometry, *, inputs: bool, weights: bool) -> int:
    """Compute the bytes of the statistics of linears."""
    roles = [Role.INPUT] * inputs + [Role.WEIGHT] * weights
    return sum(
        statistic.num_bytes(linear, role)
        for statistic in STATISTICS.values()
        for _, linear in geometry.linears()
        for role in roles
    )


def batch_bytes(
    model: PreTrainedModel, geometry: ModelGeometry, work: Workload, itemsize: int
) -> int:
    """Compute the bytes of one micro-batch inside the layer that needs most."""
    config = _text_config(model)
    scores = _scores_bytes(model, geometry, work, itemsize)
    tokens = work.rows * work.columns
    widest = max(
        max(_attention_width(layer.attention), _linear_width(layer, config))
        for layer in geometry.layers
    )
    copies = _LIVE_COPIES * itemsize + 2 * _FLOAT32_BYTES
    if work.changes_inputs:
        copies += _LIVE_COPIES * _FLOAT32_BYTES
    width = int(config.hidden_size)
    return scores + tokens * (widest * copies + width * _LIVE_COPIES * itemsize)


def change_bytes(geometry: ModelGeometry) -> int:
    """Compute the bytes to quantize and measure the largest weight (of experts: one)."""
    largest = max((x.in_features * x.out_features for _, x in geometry.linears()), default=0)
    return largest * _FLOAT32_BYTES * _LIVE_COPIES


def _attention_width(attention: Attention | None) -> int:
    if attention is None:
        return 0
    keys = attention.num_heads * attention.k_head_dim
    values = attention.num_heads * attention.v_head_dim
    return keys + values


def _window(attention: Attention | None) -> int | None:
    return None if attention is None else attention.sliding_window


def _linear_width(layer: Layer, config: Any) -> int:
    widths = [
        max(linear.in_features, linear.out_features) * _rows_per_token(linear, config)
        for linear in layer.linears
    ]
    return max(widths, default=0)


def _rows_per_token(linear: Linear, config: Any) -> int:
    if not linear.num_experts:
        return 1
    found = next((getattr(config, name, None) for name in _EXPERTS_PER_TOKEN), None)
    return min(int(found or _FEW_EXPERTS), linear.num_experts)


def _scores_bytes(
    model: PreTrainedModel, geometry: ModelGeometry, work: Workload, itemsize: int
) -> int:
    """Compute the bytes of attention: a mask, and all scores unless a fused kernel avoids them."""
    square = work.rows * work.columns**2
    is_fused = _text_config(model)._attn_implementation != "eager" and all(
        attention.k_head_dim == attention.v_head_dim for _, attention in geometry.attentions()
    )
    if is_fused:
        return square * (1 + itemsize) if _makes_mask(model, geometry, work) else 0
    num_heads = max((attention.num_heads for _, attention in geometry.attentions()), default=0)
    return square * (1 + itemsize + num_heads * (2 * itemsize + _FLOAT32_BYTES))


def _makes_mask(model: PreTrainedModel, geometry: ModelGeometry, work: Workload) -> bool:
    """Whether transformers builds a mask; the kernels need none for plain causal attention."""
    config = _text_config(model)
    windows = [_window(attention) for _, attention in geometry.attentions()]
    windows.append(getattr(config, "attention_chunk_size", None))
    is_cut = any(window is not None and window <= work.columns for window in windows)
    # With ALiBi in the config (falcon) transformers always builds a mask, used or not.
    return work.is_padded or is_cut or hasattr(config, "alibi")


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)
