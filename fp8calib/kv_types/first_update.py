"""The FP8 cache of transformers, whose scale is that of the first update.

Read and run in transformers 5.23.0: cache_utils.py Fp8QuantizedLayer.
"""

from __future__ import annotations

import torch

from fp8calib.fp8.amax import row_amax
from fp8calib.fp8.cast import round_to_format
from fp8calib.fp8.formats import E4M3FN


def fp8(x: torch.Tensor) -> torch.Tensor:
    """Store in E4M3 by the amax of the sequence, and read back: fp32 [..., H, S, D].

    The sequence is taken for the prompt of a batch of one.
    """
    amax = row_amax(x.flatten(-3))[..., None, None, None]
    scale = (amax / E4M3FN.max).clamp(min=torch.finfo(torch.float32).tiny)
    return round_to_format(x.float() / scale, E4M3FN) * scale
