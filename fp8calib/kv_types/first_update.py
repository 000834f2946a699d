"""The FP8 cache of transformers, whose scale is that of the first update.

Read and run in transformers 5.23.0: cache_utils.py Fp8QuantizedLayer.
"""

from __future__ import annotations

import torch

from fp8calib.fp8.amax import row_amax
from fp8calib.fp8.cast import round_to_format
from fp8calib.fp8.formats import E4M3FN


def fp8(x: torch.Tensor, is_prompt: torch.Tensor | None = None) -> torch.Tensor:
    """Store in E4M3 by the amax of the prompt, and read back: fp32 [B, H, S, D].

    Args:
        x: K or V of a batch, each sequence of which has a scale of its own, as alone in a batch.
        is_prompt: which tokens are the first update: bool [B, S]; None: all. Later ones clip.
    """
    prompt = x if is_prompt is None else x.where(is_prompt[:, None, :, None], 0)
    amax = row_amax(prompt.flatten(-3))[..., None, None, None]
    scale = (amax / E4M3FN.max).clamp(min=torch.finfo(torch.float32).tiny)
    return round_to_format(x.float() / scale, E4M3FN) * scale
