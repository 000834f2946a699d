"""Types of blocks that share a power of two: SGLang's.

Read in SGLang 0.5.23: kernels/ops/kvcache/mxfp8_quant_store_kv.py _mxfp8_quant_store_qkv_kernel,
srt/layers/quantization/kvfp4_tensor.py FP4MXBlock16KVQuantizeUtil.
"""

from __future__ import annotations

import torch

from fp8calib.fp8.cast import round_to_format
from fp8calib.fp8.formats import E4M3FN
from fp8calib.kv_types.fp4 import E2M1_MAX, split

MXFP8_BLOCK = 32
MX_BLOCK16 = 16
_SMALLEST_AMAX = 1e-30
_SMALLEST_SCALE = 1e-10


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Store E4M3 with a power of two for 32 values, rounded up, and read back: fp32 [..., D]."""
    blocks = split(x, MXFP8_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX)
    scale = (amax / E4M3FN.max).log2().ceil().clamp(-127, 127).exp2()
    return (round_to_format(blocks / scale, E4M3FN) * scale).flatten(-2)


def mx_block16(x: torch.Tensor) -> torch.Tensor:
    """Store E2M1 with a power of two for 16 values, rounded up, and read back: fp32 [..., D].

    Halves are rounded away from zero.
    """
    blocks = split(x, MX_BLOCK16)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (amax / E2M1_MAX).clamp(min=_SMALLEST_SCALE).log2().ceil().exp2()
    codes = blocks / scale
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    large = levels[torch.bucketize(codes.abs().contiguous(), middles, right=True)]
    return (torch.copysign(large, codes) * scale).flatten(-2)
