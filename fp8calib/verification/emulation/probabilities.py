"""Attention whose probabilities are rounded to FP8 before they multiply V.

FlashAttention 3 and vLLM's Triton kernel do so where q is FP8: P = exp(score - largest) is cast to
the format of V, times a power of two, and the sum that divides the result is that of the P before
the cast. Keys come in tiles, and `largest` is that of the tiles so far. It matters where the first
key has the largest score of all, and FlashAttention 3, which begins with the last tile, has seen it
in none but the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fp8calib.calibration.hooks import AttentionCall
from fp8calib.numerics.cast import round_positive_
from fp8calib.verification.emulation.damage import measure_damage
from fp8calib.verification.emulation.fake_quantize import FakeQuantized, Quantizer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Some heads and queries of one sequence."""

    sequence: int
    heads: slice
    rows: slice
    num_keys: int
    """How many keys the last of its queries may see."""


def attend_in_fp32(
    call: AttentionCall, quantizer: Quantizer | None, kept: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute attention in fp32, with P quantized.

    Args:
        call: q, K and V as the hooks left them, [B, H, S, D] and [B, KV heads, S, D].
        quantizer: of P; None leaves it as it is.
        kept: the positions in the batch that are no padding; None without padding.

    Returns:
        The output [B, S, H, D], and the damage to P in the first sequence: one on a CPU, one for
        each chunk on a GPU.
    """
    batch, heads, length, _ = call.query.shape
    output = call.query.new_empty(batch, length, heads, call.value.shape[-1])
    measured: list[tuple[torch.Tensor, torch.Tensor]] = []
    damage: list[torch.Tensor] = []
    for chunk in _cut(call):
        scores = _score(call, chunk)
        tile = 0 if quantizer is None else quantizer.tile
        correction = None
        if 0 < tile < chunk.num_keys:
            running = _find_running(scores, tile)
            largest = running[..., :1].clone()
            p = scores.sub_(running).exp_()
            correction = running.sub_(largest).exp_()
            total = torch.linalg.vecdot(p, correction)[..., None]
        else:
            largest = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
            p = scores.sub_(largest).exp_()
            total = p.sum(-1, keepdim=True)
        if (sinks := call.options.get("s_aux")) is not None:
            total += (sinks[chunk.heads].float()[:, None, None] - largest).exp()
        if quantizer is not None:
            counted = _find_counted(kept, chunk) if chunk.sequence == 0 else slice(0)
            before = _take_rows(p, counted)
            if p.device.type == "cpu":
                p = round_positive_(p, quantizer.fmt, scale=quantizer.scale_for(p).item())
            else:
                p = quantizer.fake(p).values
            if chunk.sequence == 0:
                measured.append((before, _take_rows(p, counted)))
            if measured and p.device.type != "cpu":
                damage.append(_measure(measured, quantizer))
                measured.clear()
        if correction is not None:
            p.mul_(correction)
        product = p @ _group(call, call.value, chunk)
        output[chunk.sequence, chunk.rows, chunk.heads] = (
            product.div_(total.clamp_(min=_TINY)).transpose(0, 1).to(output.dtype)
        )
    if measured and quantizer is not None:
        damage.append(_measure(measured, quantizer))
    return output, damage


def attending_bytes(device: torch.device, num_heads: int, length: int) -> int:
    """Compute the most memory that `attend_in_fp32` takes for sequences of a length."""
    scores = num_heads * length**2
    if device.type != "cpu":
        return 4 * 5 * min(scores, _GPU_CHUNK_SIZE)
    # the rows whose damage is measured, before and after it, and both again where they are joined
    return 4 * (5 * min(scores, _CHUNK_SIZE) + 4 * scores // _STRIDE)


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


def _cut(call: AttentionCall) -> Iterator[_Chunk]:
    batch, heads, length, _ = call.query.shape
    size, most_rows = _CHUNK_SIZE, _MOST_ROWS
    if call.query.device.type != "cpu":
        size, most_rows = _GPU_CHUNK_SIZE, _GPU_MOST_ROWS
    rows = max(1, min(length, most_rows, size // call.key.shape[2]))
    is_causal = call.mask is None and _is_causal(call)
    for sequence in range(batch):
        for row in range(0, length, rows):
            end = min(row + rows, length)
            num_keys = end if is_causal else call.key.shape[2]
            count = max(1, size // (rows * num_keys))
            for head in range(0, heads, count):
                yield _Chunk(
                    sequence=sequence,
                    heads=slice(head, min(head + count, heads)),
                    rows=slice(row, end),
                    num_keys=num_keys,
                )


def _group(call: AttentionCall, x: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """Give K or V [H, keys, D] for the heads of a chunk, fp32."""
    groups = call.query.shape[1] // x.shape[1]
    indices = torch.arange(chunk.heads.start, chunk.heads.stop, device=x.device) // groups
    return x[chunk.sequence, :, : chunk.num_keys].index_select(0, indices).float()


def _score(call: AttentionCall, chunk: _Chunk) -> torch.Tensor:
    """Compute the scores of a chunk, masked: [H, S, keys], fp32."""
    query = call.query[chunk.sequence, chunk.heads, chunk.rows].float()
    scaling = call.options.get("scaling") or query.shape[-1] ** -0.5
    scores: torch.Tensor = (query * scaling) @ _group(call, call.key, chunk).transpose(1, 2)
    if (softcap := call.options.get("softcap")) is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if (bias := call.options.get("position_bias")) is not None:
        scores += _slice(bias, chunk)
    if call.mask is None and _is_causal(call):
        # The keys after each query; those before the chunk's first query are seen by all.
        later = scores[..., chunk.rows.start :]
        later.masked_fill_(torch.ones_like(later[0], dtype=torch.bool).triu_(1), -torch.inf)
    if call.mask is None:
        return scores
    mask = _slice(call.mask, chunk)
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores.add_(mask)


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
    sequence = chunk.sequence if mask.shape[0] > 1 else 0
    heads = chunk.heads if mask.shape[1] > 1 else slice(None)
    rows = chunk.rows if mask.shape[2] > 1 else slice(None)
    return mask[sequence, heads, rows, : chunk.num_keys]


def _is_causal(call: AttentionCall) -> bool:
    given = call.options.get("is_causal")
    is_causal = getattr(call.module, "is_causal", True) if given is None else given
    return bool(is_causal) and call.query.shape[2] > 1


def _find_counted(kept: torch.Tensor | None, chunk: _Chunk) -> torch.Tensor | slice:
    """Find the measured rows of a chunk of the first sequence, none of them padding."""
    if kept is None:
        return slice(None, None, _STRIDE)
    is_inside = (kept >= chunk.rows.start) & (kept < chunk.rows.stop)
    counted: torch.Tensor = kept[is_inside] - chunk.rows.start
    return counted[::_STRIDE]


def _take_rows(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Take the measured rows; on a CPU as a copy, because P is rounded in place there."""
    taken: torch.Tensor
    taken = x[:, rows] if isinstance(rows, slice) else x.index_select(1, rows.to(x.device))
    return taken.clone() if x.device.type == "cpu" else taken


def _measure(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], quantizer: Quantizer
) -> torch.Tensor:
    """Measure the damage to the rows of some chunks, given before and after it."""
    before, after = pairs[0]
    if len(pairs) > 1:
        before, after = (
            torch.cat([x.flatten() for x in each]) for each in zip(*pairs, strict=True)
        )
    return measure_damage(before, FakeQuantized(after, None), quantizer.fmt)
