"""Histograms of log2|x| with integer counts: eight bins per octave from 2**-40 to 2**24.

Magnitudes are truncated to bfloat16 (their upper 16 bits) before they are binned. The edges of bins
are therefore bfloat16 values, and every device counts the same with integer operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import floor, log2

import torch

BINS_PER_OCTAVE = 8
LOWEST_OCTAVE = -40
HIGHEST_OCTAVE = 24
NUM_BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE + 1
"""Bin 0 counts zeros and values below 2**-40; the last bin has no upper edge."""
_CODES_PER_OCTAVE = 2**7
_LOWEST_CODE = (127 + LOWEST_OCTAVE) * _CODES_PER_OCTAVE
_BELOW = _LOWEST_CODE - 1
"""The code that counts all values below the range."""
_NUM_CODES = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * _CODES_PER_OCTAVE + 1
"""The codes in range, and `_BELOW`."""


def lower_edge(bin_index: int) -> float:
    """Smallest magnitude of a bin before truncation to bfloat16; 0.0 for bin 0."""
    if bin_index == 0:
        return 0.0
    return float(2.0 ** (LOWEST_OCTAVE + (bin_index - 1) / BINS_PER_OCTAVE))


def count_bins_of_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Count the magnitudes of every tensor by bin, on their device: int64 [len(tensors), NUM_BINS].

    The tensors have one dtype. On a GPU they are counted together, in the kernels that one takes.
    """
    device = tensors[0].device
    if device.type == "cpu":
        rows = [
            torch.bincount(_clamped_codes(x).sub_(_BELOW), minlength=_NUM_CODES) for x in tensors
        ]
        counts = torch.stack(rows)
    else:
        # On a GPU bincount waits for the largest code on the host; adding ones does not.
        codes = _clamped_codes(torch.cat([x.flatten() for x in tensors]))
        sizes = torch.tensor([x.numel() for x in tensors], dtype=torch.int32)
        owners = torch.repeat_interleave(
            sizes.to(device, non_blocking=True), output_size=len(codes)
        )
        index = torch.add(codes, owners, alpha=_NUM_CODES)
        places = _BELOW + len(tensors) * _NUM_CODES
        counts = torch.zeros(places, dtype=torch.int64, device=device)
        counts.index_add_(0, index, torch.ones_like(counts[:1]).expand(len(index)))
        counts = counts[_BELOW:]
    bins = torch.zeros(len(tensors), NUM_BINS, dtype=torch.int64, device=device)
    return bins.index_add_(1, _bin_of_code(device), counts.view(len(tensors), _NUM_CODES))


def _clamped_codes(x: torch.Tensor) -> torch.Tensor:
    """Give the bfloat16 code of each magnitude, at least `_BELOW`: int16 [N]."""
    flat = x.flatten().contiguous()
    if x.dtype is torch.bfloat16:
        codes = flat.view(torch.int16)
    else:
        codes = flat.float().view(torch.int16)[1::2]  # the lower half of every value is first
    return (codes & 0x7FFF).clamp_(_BELOW, _BELOW + _NUM_CODES - 1)


@cache
def _bin_of_code(device: torch.device) -> torch.Tensor:
    codes = torch.arange(_BELOW, _BELOW + _NUM_CODES, dtype=torch.int16)
    values = codes.view(torch.bfloat16).to(torch.float64).tolist()
    bins = (floor((log2(value) - LOWEST_OCTAVE) * BINS_PER_OCTAVE) + 1 for value in values)
    return torch.tensor([min(max(index, 0), NUM_BINS - 1) for index in bins], device=device)
