"""Reduce the hooked tensors of one batch to statistics, without padding.

On a GPU a kernel of Triton does it where it can, else torch's operations; both give the same bits.

Letters in shapes: B sequences, S tokens, R ranges of positions, H heads, D head size, C channels,
N rows, K experts a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from fp8calib.calibration.batch_view import (
    HISTOGRAM_SEQUENCES,
    INPUT_HISTOGRAM_TOKENS,
    BatchView,
    Reductions,
)
from fp8calib.calibration.hooks import ExpertsCall
from fp8calib.calibration.kernel_trial import Results, is_trusted
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
from fp8calib.numerics.histogram import count_bins


def observe_heads(batch: BatchView, role: Role, x: torch.Tensor, num_heads: int) -> Reductions:
    """Reduce K, V or q of one layer per head: [B, H, S, D], H a multiple of `num_heads`.

    Falcon repeats its KV heads before it caches them, and a server does not. A head's amax is
    therefore that of all its copies.
    """
    token_stride = 0 if role is Role.Q else 1
    is_whole = x.shape[2] == batch.shape[1]
    if is_whole and has_reduction_kernel(x.device):
        reduced: Reductions = _kernels().reduce_heads(batch, x, num_heads, token_stride)
        return reduced
    counted = x
    if is_whole and batch.is_padded:
        counted = x.masked_fill(batch.padding(x.device)[:, None, :, None], 0)
    spans = batch.spans if is_whole else [(0, x.shape[2])]  # the model adds tokens of its own
    parts = [head_amax(counted[:, :, slice(*span)]) for span in spans]
    if x.shape[1] != num_heads:
        parts = [part.view(len(part), num_heads, -1).amax(2) for part in parts]
    tensors = _join_parts(parts)
    if not is_whole:
        del tensors["positions"]
    if token_stride and batch.sampled:
        chosen = x.transpose(1, 2).flatten(0, 1)[batch.sample(x.device)]
        tensors["histogram"] = count_bins(chosen)
    return Reductions(num_tokens=batch.num_tokens, tensors=tensors)


def observe_input(batch: BatchView, site: Site, x: torch.Tensor) -> Reductions:
    """Reduce the input of a linear per channel: [..., B, S, C] or [rows, C].

    Raises:
        CalibrationError: its shape does not show which rows are padding.
    """
    num_rows = x.shape[:-1].numel()
    if num_rows == batch.num_rows and has_reduction_kernel(x.device):
        heads = x.reshape(batch.shape[0], 1, batch.shape[1], x.shape[-1])
        reduced: Reductions = _kernels().reduce_heads(batch, heads, 0, INPUT_HISTOGRAM_TOKENS)
        return reduced
    if num_rows == batch.num_rows or x.shape[-3:-1] == batch.shape:
        rows = x.reshape(-1, *batch.shape, x.shape[-1])
        if batch.is_padded:
            rows = rows.masked_fill(batch.padding(x.device).unsqueeze(-1), 0)
        streams = rows.flatten(0, 1)  # AltUp has several of the hidden states
        parts = [token_amax(streams[:, slice(*span)]) for span in batch.spans]
        if len(rows) > 1:
            parts = [part.view(*rows.shape[:2], -1).amax(0) for part in parts]
        tensors = _join_parts(parts)
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
    if batch.sampled:
        chosen: Any = batch.sample(x.device, INPUT_HISTOGRAM_TOKENS)
        if num_rows != batch.num_rows:  # the same share of the rows
            chosen = slice(None, None, max(batch.num_rows // len(chosen), 1))
        tensors["histogram"] = count_bins(x.reshape(num_rows, -1)[chosen])
    is_whole = num_rows > 0 and num_rows % batch.num_rows == 0
    return Reductions(num_tokens=batch.num_tokens if is_whole else num_rows, tensors=tensors)


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
    experts, order = torch.sort(call.index.flatten())
    if has_experts_kernel(rows.device):
        reduced: Reductions = _kernels().reduce_experts(batch, call, rows, experts, order)
        return reduced
    num_routed = call.index.shape[1]
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
    tensors = {
        "amax": channel_amax(counted),
        "positions": places.amax(0),
        "sequences": places.amax(1),
        **_reduce_experts(by_block, experts, call.num_experts),
    }
    if batch.sampled:
        of_token = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        chosen = of_token.view(-1, num_routed)[batch.sample(rows.device, INPUT_HISTOGRAM_TOKENS)]
        tensors["histogram"] = count_bins(rows[chosen.flatten()])
    return Reductions(num_tokens=batch.num_tokens, tensors=tensors)


def _reduce_experts(
    by_row: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> dict[str, torch.Tensor]:
    """Reduce rows by expert, without those of padding, whose expert is `num_experts`."""
    return {
        "experts": segment_amax(by_row, experts, num_experts + 1)[:-1],
        "expert_counts": expert_counts(experts, num_experts + 1)[:-1],
    }


def _join_parts(parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the amax of the ranges of positions, each per sequence and channel: fp32 [B, C]."""
    if len(parts) == len(parts[0]) == 1:
        largest = parts[0].amax(1)
        return {"amax": parts[0][0], "positions": largest, "sequences": largest}
    stacked = torch.stack(list(parts))
    by_place = stacked.amax(2)
    return {
        "amax": stacked.amax((0, 1)),
        "positions": by_place.amax(1),
        "sequences": by_place.amax(0),
    }


# --- the kernels ----------------------------------------------------------------------------------


def _kernels() -> Any:
    from fp8calib.calibration import kernels  # noqa: PLC0415 -- it needs Triton

    return kernels


def try_kernels(devices: Iterable[torch.device], *, has_experts: bool) -> None:
    """Try the kernels that a model needs on its GPUs."""
    for device in devices:
        has_reduction_kernel(device)
        if has_experts:
            has_experts_kernel(device)


@cache
def has_reduction_kernel(device: torch.device) -> bool:
    """Whether heads and inputs of a device are reduced by the kernel."""
    return device.type == "cuda" and is_trusted(device, *make_trial(device))


@cache
def has_experts_kernel(device: torch.device) -> bool:
    """Whether inputs of down of a device's experts are reduced by the kernel."""
    return device.type == "cuda" and is_trusted(device, *make_experts_trial(device))


def make_trial(device: torch.device) -> tuple[Callable[[], Results], Callable[[], Results]]:
    """Make reductions of a padded batch by the kernel on a device, and by torch on the CPU."""
    batch = BatchView(shape=(2, 600), lengths=(600, 590), first=HISTOGRAM_SEQUENCES - 1)
    x = torch.randn(2, 3, 600, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return (
        lambda: _kernels().reduce_heads(batch, x.to(device), 3, 1).tensors,
        lambda: observe_heads(batch, Role.K, x, 3).tensors,
    )


def make_experts_trial(device: torch.device) -> tuple[Callable[[], Results], Callable[[], Results]]:
    """Make reductions of inputs of down by the kernel on a device, and by torch on the CPU."""
    batch = BatchView(shape=(2, 600), lengths=(600, 590), first=HISTOGRAM_SEQUENCES - 1)
    numbers = torch.Generator().manual_seed(0)
    rows = torch.randn(2400, 40, generator=numbers).to(torch.bfloat16)
    index = torch.rand(1200, 40, generator=numbers).topk(2).indices
    module = SimpleNamespace(down_proj=torch.empty(41, 40, 40))
    call = ExpertsCall(path="", module=module, block=20, index=index)
    given = [rows, *torch.sort(index.flatten())]
    return (
        lambda: _kernels().reduce_experts(batch, call, *(x.to(device) for x in given)).tensors,
        lambda: observe_expert_down(batch, call, rows).tensors,
    )
