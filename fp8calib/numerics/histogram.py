"""Histograms of log2|x| with integer counts: eight bins per octave from 2**-40 to 2**24.

Magnitudes are truncated to bfloat16 (their upper 16 bits) before they are binned. The edges of bins
are therefore bfloat16 values, and every device counts the same with integer operations.
"""

from __future__ import annotations

from functools import cache
from math import floor, log2

import torch

BINS_PER_OCTAVE = 8
LOWEST_OCTAVE = -40
HIGHEST_OCTAVE = 24
NUM_BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE + 1
"""Bin 0 counts zeros and values below 2**-40; the last bin has no upper edge."""
_CODES_PER_OCTAVE = 2**7
LOWEST_CODE = (127 + LOWEST_OCTAVE) * _CODES_PER_OCTAVE
NUM_CODES = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * _CODES_PER_OCTAVE + 1
"""The codes in range, and the one before them, which counts all values below."""


def lower_edge(bin_index: int) -> float:
    """Smallest magnitude of a bin before truncation to bfloat16; 0.0 for bin 0."""
    if bin_index == 0:
        return 0.0
    return float(2.0 ** (LOWEST_OCTAVE + (bin_index - 1) / BINS_PER_OCTAVE))


def count_bins(x: torch.Tensor) -> torch.Tensor:
    """Count magnitudes by bin, on their device: int64 [NUM_BINS]."""
    flat = x.flatten().contiguous()
    if x.dtype is torch.bfloat16:
        magnitudes = flat.view(torch.int16) & 0x7FFF
    else:  # the lower half of every value is first
        magnitudes = flat.float().view(torch.int16)[1::2] & 0x7FFF
    # all values below the range count as the code before it
    codes = magnitudes.clamp_(LOWEST_CODE - 1, LOWEST_CODE + NUM_CODES - 2).sub_(LOWEST_CODE - 1)
    if x.device.type == "cpu":
        counts = torch.bincount(codes, minlength=NUM_CODES)
    else:  # bincount waits for the largest code on the host; adding ones does not
        counts = torch.zeros(NUM_CODES, dtype=torch.int64, device=x.device)
        counts.index_add_(0, codes.int(), torch.ones_like(counts[:1]).expand(len(codes)))
    bins = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device)
    return bins.index_add_(0, bin_of_code(x.device), counts)


@cache
def bin_of_code(device: torch.device) -> torch.Tensor:
    """Give the bin of each code in range and of the one before: int64 [NUM_CODES]."""
    codes = torch.arange(LOWEST_CODE - 1, LOWEST_CODE + NUM_CODES - 1, dtype=torch.int16)
    values = codes.view(torch.bfloat16).to(torch.float64).tolist()
    bins = (floor((log2(value) - LOWEST_OCTAVE) * BINS_PER_OCTAVE) + 1 for value in values)
    found = torch.tensor([min(max(index, 0), NUM_BINS - 1) for index in bins])
    return found.to(device, non_blocking=True)
