"""Latents of sparse attention, in tiles that share an fp32 scale.

Read in vLLM's csrc/cache_kernels.cu concat_and_cache_ds_mla_kernel. SGLang 0.5.23
kernels/ops/quantization/dsa_quant_k_cache.py stores the same layout by a kernel in Triton, which
multiplies by the reciprocal of the scale: few codes differ.
"""

from __future__ import annotations

import torch

from fp8calib.fp8.cast import round_to_format
from fp8calib.fp8.formats import E4M3FN
from fp8calib.kv_types.fp4 import split

TILE = 128
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def fp8_tiles(x: torch.Tensor) -> torch.Tensor:
    """Store the latent in E4M3, a scale for 128 values, and read it back: fp32 [..., D]."""
    tiles = split(x, TILE)
    scale = (tiles.abs().amax(-1, keepdim=True) / E4M3FN.max).clamp(min=_SMALLEST_SCALE)
    return (round_to_format(tiles / scale, E4M3FN) * scale).flatten(-2)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Store the rotary part in bfloat16, and read it back: fp32, the shape of `x`."""
    return x.bfloat16().float()
