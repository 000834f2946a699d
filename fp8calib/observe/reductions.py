"""Reduce the hooked tensors of one batch to statistics, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

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


@dataclass(slots=True, kw_only=True)
class Reductions:
    """The statistics of one tensor in one batch."""

    num_tokens: int
    tensors: dict[str, torch.Tensor]
    """By name, in the shapes of `SiteStats`. `positions` may be shorter: its last range is then the
    last that the batch reaches."""
    segments: tuple[torch.Tensor, ...] = ()
    """The amax of each range of positions, until they are joined; empty where `tensors` has that of
    all tokens."""
    sampled: torch.Tensor | None = None
    """The values that enter the histogram, until it is counted."""


def _complete(
    num_tokens: int,
    rows: Callable[[], torch.Tensor],
    built_in: Mapping[str, torch.Tensor | None],
    *,
    segments: tuple[torch.Tensor, ...] = (),
    sampled: torch.Tensor | None = None,
) -> Reductions:
    """Add the statistics that are not built in; they reduce `rows()`, [N, channels]."""
    tensors = {name: found for name, found in built_in.items() if found is not None}
    for statistic in STATISTICS.values():
        if statistic.observe is not None:
            tensors[statistic.name] = statistic.observe(rows())
    return Reductions(num_tokens=num_tokens, tensors=tensors, segments=segments, sampled=sampled)


def join_segments(group: Sequence[Reductions]) -> None:
    """Join the amax of the ranges of positions: of all tokens, and by range.

    The tensors are on one device. They are joined together, in the kernels that a few take.
    """
    maxima = torch._foreach_max([part for seen in group for part in seen.segments])
    positions: Iterable[torch.Tensor] = (
        [largest.view(1) for largest in maxima]  # without a kernel
        if len(maxima) == len(group)
        else torch.stack(maxima).view(len(group), -1)
    )
    first, *others = (list(each) for each in zip(*(seen.segments for seen in group), strict=True))
    for each in others:
        first = list(torch._foreach_maximum(first, each))
    for seen, amax, by_range in zip(group, first, positions, strict=True):
        seen.tensors |= {"amax": amax, "positions": by_range}
        seen.segments = ()


def observe_heads(batch: BatchView, role: Role, x: torch.Tensor, num_heads: int) -> Reductions:
    """Reduce K, V or q of one layer per head: [B, H, S, D], H a multiple of `num_heads`.

    Falcon repeats its KV heads before it caches them, and a server does not. A head's amax is
    therefore that of all its copies.
    """
    counted = x
    if batch.kept is not None:
        rows = tokens_first(x)[batch.rows("kept", x.device)]
        counted = rows.view(len(rows), x.shape[1], x.shape[3]).transpose(0, 1).unsqueeze(0)

    # The model may add tokens of its own.
    is_whole = counted.shape[2] == batch.spans[-1][1]
    spans = batch.spans if is_whole else ((None, None),)
    found = [head_amax(counted[:, :, slice(*span)]) for span in spans]
    if x.shape[1] != num_heads:
        found = [amax.reshape(num_heads, -1).amax(1) for amax in found]
    sampled = None
    if role is not Role.Q and len(batch.kv_sample):
        sampled = x.transpose(1, 2).flatten(0, 1)[batch.rows("kv_sample", x.device)]
    return _complete(
        batch.num_tokens,
        lambda: tokens_first(counted),
        {} if is_whole else {"amax": found[0]},
        segments=tuple(found) if is_whole else (),
        sampled=sampled,
    )


# --- inputs of linears -------------------------------------------------------------------------


def observe_input(batch: BatchView, site: Site, x: torch.Tensor) -> Reductions:
    """Reduce the input of a linear per channel: [..., B, S, C] or [rows, C].

    Raises:
        CalibrationError: the batch is padded, and the shape of `x` does not show which rows are
            padding.
    """
    counted = _counted_rows(batch, site, x)
    flat = (x if counted is None else counted).reshape(-1, x.shape[-1])
    segments: tuple[torch.Tensor, ...] = ()
    amax = None
    if counted is not None:
        chosen = (counted[:, slice(*span)].transpose(0, 1) for span in batch.spans)
        segments = tuple(map(channel_amax, chosen))
    else:
        amax = channel_amax(flat) if len(flat) else flat.new_zeros(x.shape[-1]).float()
    num_rows = x.shape[:-1].numel()
    is_whole = num_rows > 0 and num_rows % batch.num_rows == 0
    return _complete(
        batch.num_tokens if is_whole else num_rows,
        lambda: flat,
        {"amax": amax},
        segments=segments,
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
        {
            "amax": channel_amax(rows),
            "positions": _position_amax(batch, per_row, batch.rows("ranges", rows.device)),
            "experts": segment_amax(
                per_row.repeat_interleave(index.shape[1], 0), experts, num_experts
            ),
            "expert_counts": expert_counts(experts, num_experts),
        },
        sampled=_sample_input(batch, hidden, rows),
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
        ranges = batch.rows("all_ranges", rows.device)[order // num_routed]
    else:
        counted = pick("kept")
        experts = call.index[batch.rows("kept", rows.device)].flatten()
        ranges = batch.rows("ranges", rows.device).repeat_interleave(num_routed)
    per_block = group_amax(counted, call.block)
    per_row = per_block.amax(1, keepdim=True)
    return _complete(
        batch.num_tokens,
        lambda: counted,
        {
            "amax": channel_amax(counted),
            "positions": _position_amax(batch, per_row, ranges),
            "experts": segment_amax(per_block, experts, call.num_experts),
            "expert_counts": expert_counts(experts, call.num_experts),
        },
        sampled=pick("input_sample") if len(batch.input_sample) else None,
    )


def _position_amax(batch: BatchView, per_row: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    return segment_amax(per_row, ranges, len(batch.spans)).squeeze(1)
