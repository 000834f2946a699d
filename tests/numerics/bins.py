"""The histogram of one tensor."""

from __future__ import annotations

import torch

from fp8calib.numerics.histogram import count_bins_of_each


def count_bins(x: torch.Tensor) -> torch.Tensor:
    """Count the magnitudes of `x` by bin."""
    return count_bins_of_each([x])[0]
