"""Reduce the hooked tensors of one batch to statistics, without padding.

`positions` ends with the last range that the batch reaches, `sequences` has those of the batch.

On a GPU a kernel of Triton does it where it can, else torch's operations; both give the same bits.

Letters in shapes: B sequences, S tokens, R ranges of positions, H heads, D head size, C channels,
N rows, K experts a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from fp8calib.calibration.batch_view import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS, BatchView
from fp8calib.calibration.calibration_stats import SiteStats
from fp8calib.calibration.kernel_trial import Results, is_trusted
from fp8calib.errors import CalibrationError
from fp8calib.model.geometry import Site
from fp8calib.numerics.amax import amax_over, expert_counts, group_amax, segment_amax
from fp8calib.numerics.histogram import count_bins


def reduce_tokens(
    batch: BatchView, x: torch.Tensor, num_heads: int, token_stride: int
) -> SiteStats:
    """Reduce [B, H, S, D] per head, or with `num_heads` 0 per channel over all H.

    H is a multiple of `num_heads`: Falcon repeats its KV heads before it caches them, and a server
    does not. A head's amax is therefore that of all its copies. The histogram counts tokens by
    `token_stride`; 0 counts none.
    """
    is_whole = x.shape[2] == batch.shape[1]
    if is_whole and has_kernel("reduce_heads", x.device):
        reduced: SiteStats = _kernels().reduce_heads(batch, x, num_heads, token_stride)
        return reduced
    counted = x
    if is_whole and batch.is_padded:
        counted = x.masked_fill(batch.padding(x.device)[:, None, :, None], 0)
    spans = batch.spans if is_whole else [(0, x.shape[2])]  # the model adds tokens of its own
    parts = [amax_over(counted[:, :, first:stop], 2) for first, stop in spans]
    by_place = torch.stack(
        [p.reshape(len(p), num_heads, -1).amax(2) if num_heads else p.amax(1) for p in parts]
    )  # ranges, sequences, heads or channels
    largest = by_place.amax(2)
    tensors = {
        "amax": by_place.amax((0, 1)),
        **({"positions": largest.amax(1)} if is_whole else {}),
        "sequences": largest.amax(0),
    }
    if token_stride and batch.sampled:
        chosen = x.transpose(1, 2).flatten(0, 1)[batch.sample(x.device, token_stride)]
        tensors["histogram"] = count_bins(chosen)
    return SiteStats(count=batch.num_tokens, **tensors)


def observe_input(batch: BatchView, site: Site, x: torch.Tensor) -> SiteStats:
    """Reduce the input of a linear per channel: [..., B, S, C] or [rows, C]."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if len(rows) == batch.num_rows:
        heads = rows.view(batch.shape[0], 1, batch.shape[1], width)
        return reduce_tokens(batch, heads, 0, INPUT_HISTOGRAM_TOKENS)
    if x.shape[-3:-1] == batch.shape:  # AltUp has several of the hidden states
        seen = reduce_tokens(batch, rows.view(-1, *batch.shape, width).transpose(0, 1), 0, 0)
    elif batch.is_padded:
        raise CalibrationError(
            f"{site}: its shape {tuple(x.shape)} does not show which rows are padding of the batch "
            f"{batch.shape}",
            hint="use --batch-size 1, which needs no padding",
        )
    else:  # rows of tokens that are not known
        amax = amax_over(rows, 0) if len(rows) else rows.new_zeros(width).float()
        of_batch = {"sequences": amax.amax(0, keepdim=True)} if batch.shape[0] == 1 else {}
        is_whole = len(rows) > 0 and len(rows) % batch.num_rows == 0
        num_tokens = batch.num_tokens if is_whole else len(rows)
        seen = SiteStats(count=num_tokens, amax=amax, **of_batch)
    if batch.sampled:  # the same share of the rows
        num_sampled = len(batch.sample(x.device, INPUT_HISTOGRAM_TOKENS))
        chosen = rows[:: max(batch.num_rows // num_sampled, 1)]
        seen = replace(seen, histogram=count_bins(chosen))
    return seen


def observe_expert_input(
    batch: BatchView, site: Site, hidden: torch.Tensor, index: torch.Tensor, num_experts: int
) -> SiteStats:
    """Reduce the input of gate and up, [N, C], per channel and per expert.

    `index` has the experts that each token is routed to: int64 [N, K].
    """
    seen = observe_input(batch, site, hidden)
    by_row = amax_over(hidden, -1).unsqueeze(1).repeat_interleave(index.shape[1], 0)
    experts = _reduce_experts(batch, by_row, index, num_experts)
    return SiteStats(count=seen.count, **seen.tensors, **experts)


def observe_expert_down(
    batch: BatchView, rows: torch.Tensor, index: torch.Tensor, num_experts: int, block: int
) -> SiteStats:
    """Reduce the input of down, [N * K, C] sorted by expert, per channel and per expert.

    Of each expert `block` channels share an amax.
    """
    experts, order = torch.sort(index.flatten())
    if has_kernel("reduce_experts", rows.device):
        sizes = index.shape[1], num_experts, block
        reduced: SiteStats = _kernels().reduce_experts(batch, rows, experts, order, *sizes)
        return reduced
    by_token = torch.empty_like(rows).index_copy_(0, order, rows)
    routed = by_token.view(*batch.shape, -1, rows.shape[1]).transpose(1, 2)
    seen = reduce_tokens(batch, routed, 0, INPUT_HISTOGRAM_TOKENS)
    by_expert = _reduce_experts(batch, group_amax(by_token, block), index, num_experts)
    return SiteStats(count=seen.count, **seen.tensors, **by_expert)


def _reduce_experts(
    batch: BatchView, by_row: torch.Tensor, index: torch.Tensor, num_experts: int
) -> dict[str, torch.Tensor]:
    """Reduce magnitudes [N * K, blocks], in the order of tokens, by expert."""
    if batch.is_padded:  # padding goes to an expert of its own, without waiting for the device
        index = index.masked_fill(batch.padding(index.device).view(-1, 1), num_experts)
    experts = index.flatten()
    return {
        "experts": segment_amax(by_row, experts, num_experts + 1)[:-1],
        "expert_counts": expert_counts(experts, num_experts + 1)[:-1],
    }


# --- the kernels ----------------------------------------------------------------------------------


def _kernels() -> Any:
    from fp8calib.calibration import kernels  # noqa: PLC0415 -- it needs Triton

    return kernels


@cache
def has_kernel(name: str, device: torch.device) -> bool:
    """Whether `reduce_heads` or `reduce_experts` of a device is the kernel of this name."""
    return device.type == "cuda" and is_trusted(device, *make_trial(name, device))


def make_trial(
    name: str, device: torch.device
) -> tuple[Callable[[], Results], Callable[[], Results]]:
    """Make reductions of a padded batch by a kernel on a device, and by torch on the CPU."""
    batch = BatchView(shape=(2, 600), lengths=(600, 590), first=HISTOGRAM_SEQUENCES - 1)
    numbers = torch.Generator().manual_seed(0)
    if name == "reduce_heads":
        given = [torch.randn(2, 3, 600, 40, generator=numbers).to(torch.bfloat16)]
        arguments: tuple[int, ...] = (3, 1)
        by_torch = partial(reduce_tokens, batch, given[0], 3, 1)
    else:
        rows = torch.randn(2400, 40, generator=numbers).to(torch.bfloat16)
        index = torch.rand(1200, 40, generator=numbers).topk(2).indices
        given, arguments = [rows, *torch.sort(index.flatten())], (2, 41, 20)
        by_torch = partial(observe_expert_down, batch, rows, index, 41, 20)

    def by_kernel() -> Results:
        reduce = getattr(_kernels(), name)
        tensors: Results = reduce(batch, *(x.to(device) for x in given), *arguments).tensors
        return tensors

    return by_kernel, lambda: by_torch().tensors
