"""FP8 codes that something else made of weights, such as a rounding that runs text."""

from __future__ import annotations

from typing import Protocol

import torch

from fp8calib.quantization.matrices import Matrix


class WeightCodes(Protocol):
    """Codes that are written as they are, instead of weights rounded to nearest."""

    def __contains__(self, matrix: Matrix) -> bool: ...

    def read(self, matrix: Matrix, rows: range) -> torch.Tensor:
        """Read the codes of consecutive rows: float8_e4m3fn."""

    def read_scales(self, matrix: Matrix) -> torch.Tensor:
        """Read the scales of a weight: fp32 [], or one per row or block."""
