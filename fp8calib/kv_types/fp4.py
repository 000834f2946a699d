"""Types of E2M1 values in blocks that share a scale."""

from __future__ import annotations

import torch

from fp8calib.kv_types.rotations import hadamard
from fp8calib.numerics.cast import round_to_format
from fp8calib.numerics.formats import E4M3FN

E2M1_MAX = 6.0
NVFP4_BLOCK = 16
ULTRA_BLOCK = 32
MX_BLOCK16 = 16
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1."""
_ULTRA_FACTOR = 0.156
"""Of the largest magnitude of a block: vLLM 0.32.0 v1/attention/ops/ultraquant/format.py."""
_SMALLEST_SCALE = 1e-10
"""Of `mx_block16`, before it is rounded up."""
_FP32_MAX = torch.finfo(torch.float32).max


def nvfp4(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Store with an E4M3 scale for 16 values, and read back: fp32, the shape of `x` [..., D].

    Read in FlashInfer 0.7.2 include/flashinfer/page.cuh nvfp4_append_quantize_block.

    Args:
        x: K or V.
        scale: k_scale or v_scale, which the scales of blocks are divided by: fp32 [].
    """
    blocks = split(x, NVFP4_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    of_block = round_to_format(amax * (E2M1_MAX * scale).reciprocal(), E4M3FN)
    return _store_e2m1(blocks, of_block * scale).flatten(-2)


def nvfp4_four_over_six(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Store as `nvfp4` does, the largest value of a block at 6 or at 4, and read back.

    What has the smaller squared error is taken; of equal ones 6. Read in FlashInfer 0.7.2
    csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh cvt_warp_fp16_to_fp4, with exact
    quotients where the kernel has approximate ones.
    """
    blocks = split(x, NVFP4_BLOCK)
    by_six = blocks.abs().amax(-1, keepdim=True) / E2M1_MAX * scale.reciprocal()
    six, four = (
        _store_e2m1(blocks, round_to_format(by_six * factor, E4M3FN) * scale)
        for factor in (1.0, 1.5)
    )
    errors = [(each - blocks).square().sum(-1, keepdim=True) for each in (six, four)]
    return torch.where(errors[1] < errors[0], four, six).flatten(-2)


def ultraquant_key(x: torch.Tensor) -> torch.Tensor:
    """Store K rotated, and read it back: fp32, the shape of `x` [..., D]."""
    return hadamard(ultraquant(hadamard(x.float())))


def ultraquant_query(x: torch.Tensor) -> torch.Tensor:
    """Round the rotated q to E4M3, as it multiplies the rotated K: fp32, the shape of `x`."""
    return hadamard(round_to_format(hadamard(x.float()), E4M3FN))


def ultraquant(x: torch.Tensor) -> torch.Tensor:
    """Store with a power of two for 32 values, and read back: fp32, the shape of `x` [..., D].

    Read in vLLM 0.32.0 v1/attention/ops/ultraquant/reference.py ultraquant_encode.
    """
    blocks = split(x, ULTRA_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = (amax * _ULTRA_FACTOR).log2().add(0.5).floor().clamp(-126, 127)
    scale = torch.where(amax > 0, exponent.exp2(), 1.0)
    levels = torch.tensor(_LEVELS, device=x.device)
    levels = torch.cat([-levels[1:].flip(0), levels])
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize((blocks / scale).contiguous(), middles)  # torch warns of other layouts
    return (levels[codes] * scale).flatten(-2)


def mx_block16(x: torch.Tensor) -> torch.Tensor:
    """Store with a power of two for 16 values, rounded up, and read back: fp32 [..., D].

    Halves are rounded away from zero. Read in SGLang 0.5.23
    srt/layers/quantization/kvfp4_tensor.py FP4MXBlock16KVQuantizeUtil.
    """
    blocks = split(x, MX_BLOCK16)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (amax / E2M1_MAX).clamp(min=_SMALLEST_SCALE).log2().ceil().exp2()
    codes = blocks / scale
    levels = torch.tensor(_LEVELS, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    large = levels[torch.bucketize(codes.abs().contiguous(), middles, right=True)]
    return (torch.copysign(large, codes) * scale).flatten(-2)


def split(x: torch.Tensor, size: int) -> torch.Tensor:
    """Split vectors [..., D] into blocks: fp32 [..., D / size, size]."""
    return x.float().reshape(*x.shape[:-1], -1, size)


def _store_e2m1(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 by the scale of each block, halves to even; a scale of zero makes zeros."""
    factor = torch.where(scale > 0, scale.reciprocal().clamp(max=_FP32_MAX), 0.0)
    codes = (blocks * factor).clamp(-E2M1_MAX, E2M1_MAX)
    large = codes.abs()
    steps = torch.where(large < 2, 0.5, torch.where(large < 4, 1.0, 2.0))
    return (codes / steps).round() * steps * scale
