"""Reduce the hooked tensors of one batch to statistics, without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fp8calib.stats.histogram import count_bins
from fp8calib.stats.statistic import STATISTICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """The statistics of one tensor in one batch."""

    num_tokens: int
    tensors: Mapping[str, torch.Tensor]
    """By the name of their statistic, in the shapes of `SiteStats`. `positions` may be shorter:
    its last range is then the last that the batch reaches."""


def _complete(
    num_tokens: int, rows: Callable[[], torch.Tensor], **built_in: torch.Tensor | None
) -> Reductions:
    """Add the statistics that are not built in; they reduce `rows()`, [N, channels]."""
    tensors = {name: found for name, found in built_in.items() if found is not None}
    for statistic in STATISTICS.values():
        if statistic.observe is not None:
            tensors[statistic.name] = statistic.observe(rows())
    return Reductions(num_tokens=num_tokens, tensors=tensors)


def observe_heads(batch: BatchView, role: Role, x: torch.Tensor, num_heads: int) -> Reductions:
    """Reduce K, V or q of one layer per head: [B, H, S, D], H a multiple of `num_heads`.

    Falcon repeats its KV heads before it caches them, and a server does not. A head's amax is
    therefore that of all its copies.
    """
    counted = x
    if batch.kept is not None:
        rows = tokens_first(x)[batch.rows("kept", x.device)]
        counted = rows.view(len(rows), x.shape[1], x.shape[3]).transpose(0, 1).unsqueeze(0)
    spans: tuple[tuple[int, int | None], ...] = batch.spans
    if counted.shape[2] != spans[-1][1]:  # the model adds tokens of its own
        spans = ((0, None),)
    amax, positions = _join([head_amax(counted[:, :, first:stop]) for first, stop in spans])
    histogram = None
    if role is not Role.Q and len(batch.kv_sample):
        histogram = count_bins(tokens_first(x)[batch.rows("kv_sample", x.device)])
    return _complete(
        batch.num_tokens,
        lambda: tokens_first(counted),
        amax=amax.reshape(num_heads, -1).amax(1),
        positions=positions if spans is batch.spans else None,
        histogram=histogram,
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
    if counted is None:
        amax = channel_amax(flat) if len(flat) else flat.new_zeros(flat.shape[1]).float()
        positions = None
    else:
        parts = [counted[:, first:stop].transpose(0, 1) for first, stop in batch.spans]
        amax, positions = _join([channel_amax(part) for part in parts])
    num_rows = x.shape[:-1].numel()
    is_whole = num_rows > 0 and num_rows % batch.num_rows == 0
    return _complete(
        batch.num_tokens if is_whole else num_rows,
        lambda: flat,
        amax=amax,
        positions=positions,
        histogram=_input_histogram(batch, x, flat),
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


def _input_histogram(
    batch: BatchView, x: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor | None:
    if not len(batch.input_sample):
        return None
    if x.shape[:-1].numel() != batch.num_rows:
        return count_bins(counted[:: batch.sampling_stride])
    return count_bins(x.reshape(batch.num_rows, -1)[batch.rows("input_sample", x.device)])


def _join(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the element-wise maximum of all parts, and the largest value of each part."""
    if len(parts) == 1:
        return parts[0], parts[0].amax().unsqueeze(0)
    stacked = torch.stack(list(parts))
    return stacked.amax(0), stacked.flatten(1).amax(1)


# --- inputs of experts -------------------------------------------------------------------------


def observe_expert_input(batch: BatchView, call: ExpertsCall, hidden: torch.Tensor) -> Reductions:
    """Reduce the input of gate and up, [N, C], per channel and per expert."""
    rows, index = hidden, call.index
    if batch.kept is not None:
        kept = batch.rows("kept", hidden.device)
        rows, index = hidden[kept], index[kept]
    experts = index.flatten()
    per_row = row_amax(rows).unsqueeze(1)
    histogram = None
    if len(batch.input_sample):
        histogram = count_bins(hidden[batch.rows("input_sample", hidden.device)])
    return _complete(
        batch.num_tokens,
        lambda: rows,
        amax=channel_amax(rows),
        positions=_position_amax(batch, per_row, batch.rows("ranges", rows.device)),
        histogram=histogram,
        experts=segment_amax(
            per_row.repeat_interleave(index.shape[1], 0), experts, call.num_experts
        ),
        expert_counts=expert_counts(experts, call.num_experts),
    )


def observe_expert_down(batch: BatchView, call: ExpertsCall, rows: torch.Tensor) -> Reductions:
    """Reduce the input of down, [N * K, C] sorted by expert, per channel and per expert."""
    experts, order = torch.sort(call.index.flatten())
    tokens = order // call.index.shape[1]
    counted, is_counted = rows, torch.ones_like(experts)
    if batch.kept is not None:
        # Padding is zeroed, not removed: its number of rows depends on the routing, and reading
        # that number would wait for the GPU.
        is_counted = _flags(batch, "kept", call, rows.device)[tokens]
        counted = rows.masked_fill(is_counted.unsqueeze(1) == 0, 0.0)
    per_block = group_amax(counted, call.block)
    ranges = batch.rows("all_ranges", rows.device)[tokens]
    num_routed = torch.zeros(call.num_experts, dtype=torch.int64, device=rows.device)
    return _complete(
        batch.num_tokens,
        lambda: counted,
        amax=channel_amax(counted),
        positions=_position_amax(batch, per_block.amax(1, keepdim=True), ranges),
        histogram=_down_histogram(batch, call, counted, tokens),
        experts=segment_amax(per_block, experts, call.num_experts),
        expert_counts=num_routed.scatter_add_(0, experts, is_counted),
    )


def _flags(batch: BatchView, which: str, call: ExpertsCall, device: torch.device) -> torch.Tensor:
    """Give 1 for every token in an index list of the batch, 0 for the others: int64 [N]."""
    flags = torch.zeros(len(call.index), dtype=torch.int64, device=device)
    flags[batch.rows(which, device)] = 1
    return flags


def _position_amax(batch: BatchView, per_row: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    return segment_amax(per_row, ranges, len(batch.spans)).squeeze(1)


def _down_histogram(
    batch: BatchView, call: ExpertsCall, rows: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor | None:
    if not len(batch.input_sample):
        return None
    is_sampled = _flags(batch, "input_sample", call, rows.device)[tokens]
    if rows.device.type == "cpu":
        return count_bins(rows[is_sampled.bool()])
    # On a GPU the other rows are zeroed, as above, and their zeros subtracted from the counts.
    histogram = count_bins(rows.masked_fill(is_sampled.unsqueeze(1) == 0, 0.0))
    histogram[0] -= (1 - is_sampled).sum() * rows.shape[1]
    return histogram
