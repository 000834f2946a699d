"""Reduce the hooked tensors of one batch to statistics, without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from fp8calib.data.media import MODALITIES
from fp8calib.errors import CalibrationError
from fp8calib.fp8.amax import (
    channel_amax,
    expert_counts,
    group_amax,
    head_amax,
    row_amax,
    segment_amax,
    tokens_first,
)
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.hooks import ExpertsCall
from fp8calib.stats.statistic import STATISTICS


class Place(NamedTuple):
    """The tokens that an amax is of."""

    span: int
    """Their range of positions."""
    kind: int | None
    """The index in `MODALITIES`; None in a run of text."""


@dataclass(slots=True, kw_only=True)
class Reductions:
    """The statistics of one tensor in one batch."""

    num_tokens: int
    amax: tuple[torch.Tensor, ...]
    """In the shape of `SiteStats.amax`: of the tokens in each range of positions, or of all."""
    places: tuple[Place, ...]
    """The range of positions and the modality of each tensor in `amax`; empty where not known."""
    tensors: dict[str, torch.Tensor]
    """The others by name, in the shapes of `SiteStats`. `positions` may be shorter: its last range
    is then the last that the batch reaches."""
    sampled: torch.Tensor | None = None
    """The values that enter the histogram, until it is counted."""


def _complete(
    num_tokens: int,
    rows: Callable[[], torch.Tensor],
    *,
    amax: tuple[torch.Tensor, ...],
    places: tuple[Place, ...] = (),
    sampled: torch.Tensor | None = None,
    by_modality: Mapping[str, torch.Tensor] = MappingProxyType({}),
    **built_in: torch.Tensor | None,
) -> Reductions:
    """Add the statistics that are not built in; they reduce `rows()`, [N, channels]."""
    given = {**built_in, **by_modality}
    tensors = {name: found for name, found in given.items() if found is not None}
    for statistic in STATISTICS.values():
        if statistic.observe is not None:
            tensors[statistic.name] = statistic.observe(rows())
    return Reductions(
        num_tokens=num_tokens, amax=amax, places=places, tensors=tensors, sampled=sampled
    )


def _list_places(batch: BatchView) -> tuple[Place, ...]:
    """List the places of a batch's parts: its segments, or ranges of positions."""
    if batch.segments:
        return tuple(Place(segment.span, segment.kind) for segment in batch.segments)
    kind = None if batch.kinds is None else 0
    return tuple(Place(span, kind) for span in range(len(batch.spans)))


def _list_rows(batch: BatchView, device: torch.device) -> list[slice | torch.Tensor]:
    """List the rows of each place, among those that count."""
    if batch.segments:
        return [batch.pick(segment, device) for segment in batch.segments]
    return [slice(first, stop) for first, stop in batch.spans]


def observe_heads(batch: BatchView, role: Role, x: torch.Tensor, num_heads: int) -> Reductions:
    """Reduce K, V or q of one layer per head: [B, H, S, D], H a multiple of `num_heads`.

    Falcon repeats its KV heads before it caches them, and a server does not. A head's amax is
    therefore that of all its copies.
    """
    counted = x
    if batch.kept is not None:
        rows = tokens_first(x)[batch.rows("kept", x.device)]
        counted = rows.view(len(rows), x.shape[1], x.shape[3]).transpose(0, 1).unsqueeze(0)
    places, parts = _list_places(batch), _list_rows(batch, x.device)
    if counted.shape[2] != batch.spans[-1][1]:  # the model adds tokens of its own
        places, parts = (), [slice(None)]
    amax = tuple(head_amax(counted[:, :, part]) for part in parts)
    if x.shape[1] != num_heads:
        amax = tuple(part.reshape(num_heads, -1).amax(1) for part in amax)
    sampled = None
    if role is not Role.Q and len(batch.kv_sample):
        sampled = x.transpose(1, 2).flatten(0, 1)[batch.rows("kv_sample", x.device)]
    return _complete(
        batch.num_tokens,
        lambda: tokens_first(counted),
        amax=amax,
        places=places,
        sampled=sampled,
    )


def observe_tower(batch: BatchView, amax: torch.Tensor, x: torch.Tensor) -> Reductions:
    """Reduce a tensor of a tower, [..., C], whose rows are no tokens; `amax` is its own."""
    rows = x.reshape(-1, x.shape[-1])
    sampled = rows[:: batch.sampling_stride] if len(batch.input_sample) else None
    return _complete(len(rows), lambda: rows, amax=(amax,), sampled=sampled)


# --- inputs of linears -------------------------------------------------------------------------


def observe_input(batch: BatchView, site: Site, x: torch.Tensor) -> Reductions:
    """Reduce the input of a linear per channel: [..., B, S, C] or [rows, C].

    Raises:
        CalibrationError: the batch is padded, and the shape of `x` does not show which rows are
            padding.
    """
    counted = _counted_rows(batch, site, x)
    flat = (x if counted is None else counted).reshape(-1, x.shape[-1])
    if counted is not None:
        chosen = (counted[:, rows].transpose(0, 1) for rows in _list_rows(batch, x.device))
        amax = tuple(map(channel_amax, chosen))
    else:
        amax = (channel_amax(flat) if len(flat) else flat.new_zeros(x.shape[-1]).float(),)
    num_rows = x.shape[:-1].numel()
    is_whole = num_rows > 0 and num_rows % batch.num_rows == 0
    return _complete(
        batch.num_tokens if is_whole else num_rows,
        lambda: flat,
        amax=amax,
        places=() if counted is None else _list_places(batch),
        sampled=_sample_input(batch, x, flat),
    )


def _counted_rows(batch: BatchView, site: Site, x: torch.Tensor) -> torch.Tensor | None:
    """Give the rows that count, [L, N, C], with the spans on axis N; None if they are not known."""
    if x.shape[:-1].numel() == batch.num_rows or x.shape[-3:-1] == batch.shape:
        if batch.kept is None:
            return x.reshape(-1, batch.shape[1], x.shape[-1])
        return x.reshape(-1, batch.num_rows, x.shape[-1])[:, batch.rows("kept", x.device)]
    if batch.kept is None:
        return None
    raise CalibrationError(
        f"{site}: its shape {tuple(x.shape)} does not show which rows are padding of the batch "
        f"{batch.shape}",
        hint="use --batch-size 1, which needs no padding",
    )


def _sample_input(batch: BatchView, x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor | None:
    if not len(batch.input_sample):
        return None
    if x.shape[:-1].numel() != batch.num_rows:
        return counted[:: batch.sampling_stride]
    return x.reshape(batch.num_rows, -1)[batch.rows("input_sample", x.device)]


# --- inputs of experts -------------------------------------------------------------------------


def observe_expert_input(
    batch: BatchView, hidden: torch.Tensor, index: torch.Tensor, num_experts: int
) -> Reductions:
    """Reduce the input of gate and up, [N, C], per channel and per expert.

    `index` has the experts that each token is routed to: int64 [N, K].
    """
    rows = hidden
    if batch.kept is not None:
        kept = batch.rows("kept", hidden.device)
        rows, index = hidden[kept], index[kept]
    experts = index.flatten()
    per_row = row_amax(rows).unsqueeze(1)
    return _complete(
        batch.num_tokens,
        lambda: rows,
        amax=(channel_amax(rows),),
        positions=_position_amax(batch, per_row, batch.rows("ranges", rows.device)),
        by_modality=_list_experts_media(batch, rows, per_row, None),
        sampled=_sample_input(batch, hidden, rows),
        experts=segment_amax(per_row.repeat_interleave(index.shape[1], 0), experts, num_experts),
        expert_counts=expert_counts(experts, num_experts),
    )


def observe_expert_down(batch: BatchView, call: ExpertsCall, rows: torch.Tensor) -> Reductions:
    """Reduce the input of down, [N * K, C] sorted by expert, per channel and per expert."""
    num_routed = call.index.shape[1]
    experts, order = torch.sort(call.index.flatten())

    def pick(which: str) -> torch.Tensor:
        """Give the rows of the tokens in an index list: their number does not depend on routing."""
        places = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        chosen = places.view(-1, num_routed)[batch.rows(which, rows.device)]
        return rows[chosen.flatten()]

    counted = rows
    if batch.kept is None:
        tokens = order // num_routed
        ranges = batch.rows("all_ranges", rows.device)[tokens]
    else:
        tokens = None
        counted = pick("kept")
        experts = call.index[batch.rows("kept", rows.device)].flatten()
        ranges = batch.rows("ranges", rows.device).repeat_interleave(num_routed)
    per_block = group_amax(counted, call.block)
    return _complete(
        batch.num_tokens,
        lambda: counted,
        amax=(channel_amax(counted),),
        positions=_position_amax(batch, per_block.amax(1, keepdim=True), ranges),
        by_modality=_list_experts_media(batch, counted, per_block.amax(1, keepdim=True), tokens),
        sampled=pick("input_sample") if len(batch.input_sample) else None,
        experts=segment_amax(per_block, experts, call.num_experts),
        expert_counts=expert_counts(experts, call.num_experts),
    )


def _list_experts_media(
    batch: BatchView, rows: torch.Tensor, per_row: torch.Tensor, tokens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Reduce rows by modality; `tokens` has the token of each row, None if they are in order."""
    if batch.kinds is None:
        return {}
    if not batch.segments:  # all is text, of which padding is left out already
        text = {"text": channel_amax(rows)}
        return {**text, "modalities": text["text"].max().expand(1)}
    kinds = batch.rows("kinds", rows.device)
    kinds = kinds if tokens is None else kinds[tokens]
    return {
        "modalities": segment_amax(per_row, kinds, len(MODALITIES)).squeeze(1),
        "text": channel_amax(rows.masked_fill((kinds != 0).unsqueeze(1), 0)),
    }


def _position_amax(batch: BatchView, per_row: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    return segment_amax(per_row, ranges, len(batch.spans)).squeeze(1)
