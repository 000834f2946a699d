"""Reduce the hooked tensors of one batch to statistics, without padding.

Letters in shapes: B sequences, S tokens, R ranges of positions, H heads, D head size, C channels,
N rows, K experts a token goes to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8calib.calibration.batch_view import INPUT_HISTOGRAM_TOKENS, BatchView
from fp8calib.calibration.hooks import ExpertsCall
from fp8calib.errors import CalibrationError
from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.amax import (
    channel_amax,
    expert_counts,
    group_amax,
    head_amax,
    row_amax,
    segment_amax,
    token_amax,
)
from fp8calib.numerics.histogram import count_bins_of_each


@dataclass(slots=True, kw_only=True)
class Reductions:
    """The statistics of one tensor in one batch."""

    num_tokens: int
    tensors: dict[str, torch.Tensor]
    """By name, in the shapes of `SiteStats`. `positions` ends with the last range that the batch
    reaches, and `sequences` has those of the batch."""
    parts: tuple[torch.Tensor, ...] = ()
    """The amax of each sequence in each range of positions, fp32 [B, C], until `finish`."""
    sampled: torch.Tensor | None = None
    """The values that enter the histogram, until `count_samples`."""


def observe_heads(batch: BatchView, role: Role, x: torch.Tensor, num_heads: int) -> Reductions:
    """Reduce K, V or q of one layer per head: [B, H, S, D], H a multiple of `num_heads`.

    Falcon repeats its KV heads before it caches them, and a server does not. A head's amax is
    therefore that of all its copies.
    """
    counted = x
    spans = batch.spans
    is_whole = x.shape[2] == batch.shape[1]
    if not is_whole:  # the model adds tokens of its own
        spans = [(0, x.shape[2])]
    elif batch.is_padded:
        counted = x.masked_fill(batch.padding(x.device)[:, None, :, None], 0)
    parts = [head_amax(counted[:, :, slice(*span)]) for span in spans]
    if x.shape[1] != num_heads:
        parts = [part.view(len(part), num_heads, -1).amax(2) for part in parts]
    tensors = {} if is_whole else {"amax": parts[0].amax(0), "sequences": parts.pop().amax(1)}
    sampled = None
    if role is not Role.Q and batch.sampled:
        sampled = x.transpose(1, 2).flatten(0, 1)[batch.sample(x.device)]
    return Reductions(
        num_tokens=batch.num_tokens, tensors=tensors, parts=tuple(parts), sampled=sampled
    )


def observe_input(batch: BatchView, site: Site, x: torch.Tensor) -> Reductions:
    """Reduce the input of a linear per channel: [..., B, S, C] or [rows, C].

    Raises:
        CalibrationError: the batch is padded, and the shape of `x` does not show which rows are
            padding.
    """
    num_rows = x.shape[:-1].numel()
    parts: list[torch.Tensor] = []
    tensors: dict[str, torch.Tensor] = {}
    if num_rows == batch.num_rows or x.shape[-3:-1] == batch.shape:
        rows = x.reshape(-1, *batch.shape, x.shape[-1])
        if batch.is_padded:
            rows = rows.masked_fill(batch.padding(x.device).unsqueeze(-1), 0)
        streams = rows.flatten(0, 1)  # AltUp has several of the hidden states
        parts = [token_amax(streams[:, slice(*span)]) for span in batch.spans]
        if len(rows) > 1:
            parts = [part.view(*rows.shape[:2], -1).amax(0) for part in parts]
    elif batch.is_padded:
        raise CalibrationError(
            f"{site}: its shape {tuple(x.shape)} does not show which rows are padding of the batch "
            f"{batch.shape}",
            hint="use --batch-size 1, which needs no padding",
        )
    else:  # rows of tokens that are not known
        flat = x.reshape(-1, x.shape[-1])
        amax = channel_amax(flat) if len(flat) else flat.new_zeros(x.shape[-1]).float()
        tensors = {"amax": amax}
        if batch.shape[0] == 1:
            tensors["sequences"] = amax.amax(0, keepdim=True)
    sampled = None
    if batch.sampled:
        chosen: Any = batch.sample(x.device, INPUT_HISTOGRAM_TOKENS)
        if num_rows != batch.num_rows:  # as large a share of the rows
            chosen = slice(None, None, max(batch.num_rows // len(chosen), 1))
        sampled = x.reshape(num_rows, -1)[chosen]
    is_whole = num_rows > 0 and num_rows % batch.num_rows == 0
    return Reductions(
        num_tokens=batch.num_tokens if is_whole else num_rows,
        tensors=tensors,
        parts=tuple(parts),
        sampled=sampled,
    )


def observe_expert_input(
    batch: BatchView, site: Site, hidden: torch.Tensor, index: torch.Tensor, num_experts: int
) -> Reductions:
    """Reduce the input of gate and up, [N, C], per channel and per expert.

    `index` has the experts that each token is routed to: int64 [N, K].
    """
    seen = observe_input(batch, site, hidden)
    if batch.is_padded:  # padding goes to an expert of its own, without waiting for the device
        index = index.masked_fill(batch.padding(hidden.device).view(-1, 1), num_experts)
    by_row = row_amax(hidden).unsqueeze(1).repeat_interleave(index.shape[1], 0)
    seen.tensors |= _reduce_experts(by_row, index.flatten(), num_experts)
    return seen


def observe_expert_down(batch: BatchView, call: ExpertsCall, rows: torch.Tensor) -> Reductions:
    """Reduce the input of down, [N * K, C] sorted by expert, per channel and per expert."""
    num_routed = call.index.shape[1]
    experts, order = torch.sort(call.index.flatten())
    counted = rows
    if batch.is_padded:
        is_padding = batch.padding(rows.device).flatten()[order // num_routed]
        counted = rows.masked_fill(is_padding.unsqueeze(1), 0)
        experts = experts.masked_fill(is_padding, call.num_experts)
    by_block = group_amax(counted, call.block)
    by_row = by_block.amax(1, keepdim=True)
    if (num_places := batch.shape[0] * len(batch.spans)) == 1:
        places = by_row.amax(0, keepdim=True)
    else:
        place = batch.places(rows.device)[order // num_routed]
        places = segment_amax(by_row, place, num_places).view(batch.shape[0], -1)
    sampled = None
    if batch.sampled:
        of_token = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        chosen = of_token.view(-1, num_routed)[batch.sample(rows.device, INPUT_HISTOGRAM_TOKENS)]
        sampled = rows[chosen.flatten()]
    tensors = {
        "amax": channel_amax(counted),
        "positions": places.amax(0),
        "sequences": places.amax(1),
        **_reduce_experts(by_block, experts, call.num_experts),
    }
    return Reductions(num_tokens=batch.num_tokens, tensors=tensors, sampled=sampled)


def _reduce_experts(
    by_row: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> dict[str, torch.Tensor]:
    """Reduce rows by expert, without those of padding, whose expert is `num_experts`."""
    return {
        "experts": segment_amax(by_row, experts, num_experts + 1)[:-1],
        "expert_counts": expert_counts(experts, num_experts + 1)[:-1],
    }


def finish(seen: Sequence[Reductions]) -> None:
    """Count the histograms and join the parts of many tensors, alike ones in a kernel."""
    count_samples(seen)
    groups = defaultdict[tuple[torch.device, tuple[int, ...]], list[Reductions]](list)
    for each in seen:
        if each.parts:
            shape = len(each.parts), *each.parts[0].shape
            groups[each.parts[0].device, () if shape[:2] == (1, 1) else shape].append(each)
    for (_, shape), group in groups.items():
        if not shape:  # one range of one sequence, of any number of channels
            amax = [each.parts[0][0] for each in group]
            positions = sequences = [largest.view(1) for largest in torch._foreach_max(amax)]
        else:
            parts = torch.stack([part for each in group for part in each.parts])
            found = parts.view(len(group), *shape)
            by_part = found.amax(3)
            amax = list(found.amax((1, 2)))
            positions, sequences = list(by_part.amax(2)), list(by_part.amax(1))
        for each, *joined in zip(group, amax, positions, sequences, strict=True):
            each.tensors |= dict(zip(("amax", "positions", "sequences"), joined, strict=True))
            each.parts = ()


def count_samples(seen: Iterable[Reductions]) -> None:
    """Count the histograms of many tensors, alike ones in a kernel."""
    groups = defaultdict[tuple[torch.device, torch.dtype], list[Reductions]](list)
    for each in seen:
        if each.sampled is not None:
            groups[each.sampled.device, each.sampled.dtype].append(each)
    for group in groups.values():
        sampled = [each.sampled for each in group if each.sampled is not None]
        for each, histogram in zip(group, count_bins_of_each(sampled), strict=True):
            each.tensors["histogram"], each.sampled = histogram, None
