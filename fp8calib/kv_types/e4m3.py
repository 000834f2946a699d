"""Types of E4M3 values whose scale is that of a block, of a tile of latents or of an update."""

from __future__ import annotations

import torch

from fp8calib.kv_types.fp4 import split
from fp8calib.numerics.amax import row_amax
from fp8calib.numerics.cast import round_to_format
from fp8calib.numerics.formats import E4M3FN

MXFP8_BLOCK = 32
TILE = 128
_SMALLEST_AMAX = 1e-30
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Store with a power of two for 32 values, rounded up, and read back: fp32 [..., D].

    Read in SGLang 0.5.23: kernels/ops/kvcache/mxfp8_quant_store_kv.py
    _mxfp8_quant_store_qkv_kernel.
    """
    blocks = split(x, MXFP8_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX)
    scale = (amax / E4M3FN.max).log2().ceil().clamp(-127, 127).exp2()
    return (round_to_format(blocks / scale, E4M3FN) * scale).flatten(-2)


def latent_tiles(x: torch.Tensor) -> torch.Tensor:
    """Store latents with an fp32 scale for 128 values, and read them back: fp32 [..., D].

    Read in vLLM's csrc/cache_kernels.cu concat_and_cache_ds_mla_kernel. SGLang 0.5.23
    kernels/ops/quantization/dsa_quant_k_cache.py stores the same layout by a kernel in Triton,
    which multiplies by the reciprocal of the scale: few codes differ.
    """
    tiles = split(x, TILE)
    scale = (tiles.abs().amax(-1, keepdim=True) / E4M3FN.max).clamp(min=_SMALLEST_SCALE)
    return (round_to_format(tiles / scale, E4M3FN) * scale).flatten(-2)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Store the rotary part of latents in bfloat16, and read it back: fp32, the shape of `x`."""
    return x.bfloat16().float()


def first_update(x: torch.Tensor, is_prompt: torch.Tensor | None = None) -> torch.Tensor:
    """Store by the amax of the prompt, and read back: fp32 [B, H, S, D].

    Read and run in transformers 5.23.0: cache_utils.py Fp8QuantizedLayer.

    Args:
        x: K or V of a batch, each sequence of which has a scale of its own, as alone in a batch.
        is_prompt: which tokens are the first update: bool [B, S]; None: all. Later ones clip.
    """
    prompt = x if is_prompt is None else x.where(is_prompt[:, None, :, None], 0)
    amax = row_amax(prompt.flatten(-3))[..., None, None, None]
    scale = (amax / E4M3FN.max).clamp(min=_SMALLEST_SCALE)
    return round_to_format(x.float() / scale, E4M3FN) * scale
