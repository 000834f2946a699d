"""Attention whose probabilities are rounded to FP8 before they multiply V.

FlashAttention 3 and vLLM's Triton kernel do so where q is FP8: P = exp(score - largest) is cast to
the format of V, times a power of two, and the sum that divides the result is that of the P before
the cast. Keys come in tiles, and `largest` is that of the tiles so far. It matters where the first
key has the largest score of all, and FlashAttention 3, which begins with the last tile, has seen it
in none but the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from fp8calib.calibration.kernel_trial import Results, is_trusted
from fp8calib.numerics.cast import round_positive_
from fp8calib.numerics.formats import E4M3FN
from fp8calib.verification.emulation.fake_quantize import (
    DamageRow,
    FakeQuantized,
    Quantizer,
    add_damage,
    measure_damage,
)

_CHUNK_SIZE = 1 << 18
"""Scores that are held at a time."""
_MOST_ROWS = 64
"""Queries at a time: fewer of the scores that a causal mask hides are computed."""
_GPU_CHUNK_SIZE, _GPU_MOST_ROWS = 1 << 25, 1024
"""The same on a GPU, where each chunk launches its own kernels."""
_STRIDE = 8
"""The damage to P is measured in every 8th query."""
_LOWEST = torch.finfo(torch.float32).min
_TINY = torch.finfo(torch.float32).tiny
"""The output of a query that sees no key, such as one of padding under a window, is zero."""
_CLOSE = 0.02
"""How far, relative to the output, 16-bit attention may be from that in fp32."""
_MARGIN, TOLERANCE = 1e-3, 1e-4
"""How far P is from where rounding changes, and from torch's, when the kernel is tried; a step of
the format is at least 1/16 of P."""


Softened = tuple[torch.Tensor, torch.Tensor, DamageRow | None]
"""Softmax's numerators [H, S, keys], rounded; what they sum up to before that, [H, S, 1]; and the
damage to the queries that are measured, if there are any."""
_Chunk = tuple[int, slice, slice, slice]
"""A sequence, and some of its heads, queries and keys."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function of a layer."""

    function: Callable[..., Any]
    """The model's own."""
    module: nn.Module
    query: torch.Tensor
    """[B, H, S, D]; K and V have KV heads instead."""
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: Mapping[str, Any]
    """By keyword: `scaling`, `softcap`, `s_aux` and others."""

    def run(self) -> Any:
        """Call the model's function: the output [B, S, H, D], and weights or None."""
        tensors = (self.query, self.key, self.value, self.mask)
        return self.function(self.module, *tensors, **self.options)


def attend_in_fp32(
    call: AttentionCall, quantizer: Quantizer | None, kept: torch.Tensor | None
) -> tuple[torch.Tensor, list[DamageRow]]:
    """Compute attention in fp32 with P quantized, or as it is without a quantizer.

    `kept` are the positions in the batch that are not padding; None without padding.

    Returns:
        The output [B, S, H, D], and the damage to P in chunks of the first sequence.
    """
    batch, heads, length, _ = call.query.shape
    output = call.query.new_empty(batch, length, heads, call.value.shape[-1])
    damage: list[DamageRow] = []
    soften: Callable[..., Softened] = _soften
    if quantizer is not None and has_probability_kernel(call.query.device):
        from fp8calib.verification.emulation import kernels  # noqa: PLC0415 -- it needs Triton

        soften = kernels.round_probabilities_
    # keys after a query are hidden, beside what a mask hides
    given = call.options.get("is_causal")
    is_causal = getattr(call.module, "is_causal", True) if given is None else given
    is_causal = bool(is_causal) and length > 1 and call.mask is None
    sinks = call.options.get("s_aux")
    size, most_rows = _CHUNK_SIZE, _MOST_ROWS
    if call.query.device.type != "cpu":
        size, most_rows = _GPU_CHUNK_SIZE, _GPU_MOST_ROWS
    num_rows = max(1, min(length, most_rows, size // call.key.shape[2]))
    for sequence, start in itertools.product(range(batch), range(0, length, num_rows)):
        rows = slice(start, min(start + num_rows, length))
        keys = slice(rows.stop if is_causal else call.key.shape[2])
        counted = None  # the queries of the first sequence that are measured, none of them padding
        if sequence == 0 and kept is None:
            counted = torch.arange(0, rows.stop - start, _STRIDE)
        elif sequence == 0 and kept is not None:
            counted = kept[(kept >= start) & (kept < rows.stop)][::_STRIDE] - start
            counted = counted if len(counted) else None
        step = max(1, size // (num_rows * keys.stop))
        for head in range(0, heads, step):
            chosen = slice(head, min(head + step, heads))
            p, total, row = soften(
                *(_score(call, (sequence, chosen, rows, keys)), quantizer),
                first_row=start if is_causal else None,
                sinks=None if sinks is None else sinks[chosen],
                counted=counted,
            )
            damage += [] if row is None else [row]
            product = (p @ _group(call.value[sequence, :, keys], chosen, heads)).div_(total)
            output[sequence, rows, chosen] = product.transpose(0, 1).to(output.dtype)
    return output, damage


def attending_bytes(device: torch.device, num_heads: int, length: int) -> int:
    """Compute the most memory that `attend_in_fp32` takes for sequences of a length."""
    scores = num_heads * length**2
    if device.type != "cpu":
        return 4 * 5 * min(scores, _GPU_CHUNK_SIZE)
    scores = min(scores, _CHUNK_SIZE)
    return 4 * (5 * scores + 4 * scores // _STRIDE)  # and the rows that are measured


def is_reproduced(call: AttentionCall, kept: torch.Tensor | None) -> bool:
    """Tell whether `attend_in_fp32` without a quantizer computes what the model computes."""
    expected = call.run()[0]
    found = attend_in_fp32(call, None, kept)[0]
    if expected.shape != found.shape:
        return False
    a, b = (x.flatten(0, 1).float() for x in (expected, found))
    if kept is not None and int(kept[-1]) < len(a):
        a, b = a[kept.to(a.device)], b[kept.to(b.device)]
    return bool((a - b).norm() <= _CLOSE * a.norm())


def _group(x: torch.Tensor, chosen: slice, num_heads: int) -> torch.Tensor:
    """Give K or V [KV heads, keys, D] for some query heads: [H, keys, D], fp32."""
    indices = torch.arange(chosen.start, chosen.stop, device=x.device) // (num_heads // len(x))
    return x.index_select(0, indices).float()


def _score(call: AttentionCall, chunk: _Chunk) -> torch.Tensor:
    """Compute the scores of a chunk, [H, S, keys], fp32; of masks only the model's is applied."""
    sequence, chosen, rows, keys = chunk
    query = call.query[sequence, chosen, rows].float()
    scaling = call.options.get("scaling") or query.shape[-1] ** -0.5
    key = _group(call.key[sequence, :, keys], chosen, call.query.shape[1])
    scores: torch.Tensor = (query * scaling) @ key.transpose(1, 2)
    if (softcap := call.options.get("softcap")) is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if (bias := call.options.get("position_bias")) is not None:
        scores += _slice(bias, chunk)
    if call.mask is None:
        return scores
    mask = _slice(call.mask, chunk)
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores.add_(mask)


def _soften(
    scores: torch.Tensor,
    quantizer: Quantizer | None,
    *,
    first_row: int | None,
    sinks: torch.Tensor | None,
    counted: torch.Tensor | None,
) -> Softened:
    """Turn scores [H, S, keys], fp32, into softmax's numerators, in place where torch can.

    `first_row` is the index of the first query, where the keys after each query are not hidden yet;
    `sinks` are a score for each head [H] that only the sums contain; the damage to the queries
    `counted`, on the CPU, is measured.
    """
    if first_row is not None:
        later = scores[..., first_row:]  # all see the keys before the first query
        later.masked_fill_(torch.ones_like(later[0], dtype=torch.bool).triu_(1), -torch.inf)
    tile = 0 if quantizer is None else quantizer.tile
    correction = None
    if 0 < tile < scores.shape[-1]:
        running = _find_running(scores, tile)
        largest = running[..., :1].clone()
        p = scores.sub_(running).exp_()
        correction = running.sub_(largest).exp_()
        total = torch.linalg.vecdot(p, correction)[..., None]
    else:
        largest = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
        p = scores.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.float()[:, None, None] - largest).exp()
    damage = None
    if quantizer is not None:
        rows = None if counted is None else counted.to(p.device, non_blocking=True)
        before = None if rows is None else p.index_select(1, rows)
        if p.device.type == "cpu":
            p = round_positive_(p, quantizer.fmt, scale=quantizer.scale_for(p).item())
        else:
            p = quantizer.fake(p).values
        if before is not None and rows is not None:
            damage = measure_damage(before, FakeQuantized(p.index_select(1, rows), None))
    if correction is not None:
        p.mul_(correction)
    return p, total.clamp_(min=_TINY), damage


def _find_running(scores: torch.Tensor, tile: int) -> torch.Tensor:
    """Give each key the largest score of its tile and of those after it: [H, S, keys]."""
    keys = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -keys % tile), value=-torch.inf)
    tiles = padded.view(*scores.shape[:-1], -1, tile).amax(-1)
    running = tiles.flip(-1).cummax(-1).values.flip(-1).clamp_(min=_LOWEST)
    spread: torch.Tensor = running[..., None].expand(*running.shape, tile).flatten(-2)
    return spread[..., :keys]


def _slice(mask: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """Take what a mask [B or 1, H or 1, S or 1, keys] has for a chunk."""
    sequence, chosen, rows, keys = chunk
    return mask[
        sequence if mask.shape[0] > 1 else 0,
        chosen if mask.shape[1] > 1 else slice(None),
        rows if mask.shape[2] > 1 else slice(None),
        keys,
    ]


# --- the kernel -----------------------------------------------------------------------------------


@cache
def has_probability_kernel(device: torch.device) -> bool:
    """Whether the probabilities of a device are rounded by the kernel."""
    return device.type == "cuda" and is_trusted(device, *make_p_trial(device), tolerance=TOLERANCE)


def make_p_trial(device: torch.device) -> tuple[Callable[[], Results], Callable[[], Results]]:
    """Round probabilities in tiles by the kernel on a device, and by torch on the CPU.

    None is near the middle of two values of the format: exp may differ in its last places.
    """
    numbers = torch.Generator().manual_seed(0)
    quantizer = Quantizer(fmt=E4M3FN, scale=torch.tensor([1 / 256]), tile=80)
    scores = 2 * torch.randn(2, 40, 300, generator=numbers)
    scores[..., :80] += 4  # the largest are in the tile that is taken last
    p = torch.exp(scores - _find_running(scores, quantizer.tile))
    below, above = (quantizer.fake(p * factor).values for factor in (1 - _MARGIN, 1 + _MARGIN))
    scores.masked_fill_(below != above, -torch.inf)

    def run(device: torch.device, soften: Callable[..., Softened]) -> Results:
        p, total, row = soften(
            *(scores.to(device, copy=True), quantizer.to(device)),
            first_row=260,
            sinks=torch.tensor([8.0, 12.0]).to(device),
            counted=torch.arange(0, 40, _STRIDE),
        )
        assert row is not None  # noqa: S101 -- rows are counted
        damage: dict[str, torch.Tensor] = {}
        add_damage(damage, [("damage", row)])
        return {"P": p, "sums of P": total, **damage}

    def by_kernel() -> Results:
        from fp8calib.verification.emulation import kernels  # noqa: PLC0415 -- it needs Triton

        return run(device, kernels.round_probabilities_)

    return by_kernel, lambda: run(torch.device("cpu"), _soften)
