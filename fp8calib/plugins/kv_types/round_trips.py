"""What types of the KV cache store, read back: K, V or q [..., D] to fp32 of that shape."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fp8calib.numerics.amax import amax_over
from fp8calib.numerics.cast import round_to_format
from fp8calib.numerics.formats import E4M3FN

_E2M1_MAX = 6.0
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of E2M1
_FP32 = torch.finfo(torch.float32)


def e4m3_unscaled(x: torch.Tensor) -> torch.Tensor:
    """Store in E4M3 without a scale."""
    return round_to_format(x, E4M3FN)


def e4m3_vectors(x: torch.Tensor) -> torch.Tensor:
    """Store in E4M3 with a scale for each vector.

    Read, as `int8_vectors`, in vLLM 0.32.0 v1/attention/ops/triton_reshape_and_cache_flash.py
    _reshape_cache_per_token_head.
    """
    scale = (amax_over(x, -1).unsqueeze(-1) / E4M3FN.max).clamp(min=1e-6)
    return round_to_format(x.float() * scale.reciprocal(), E4M3FN) * scale


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Store in E4M3 with a power of two for 32 values, rounded up.

    Read in SGLang 0.5.23: kernels/ops/kvcache/mxfp8_quant_store_kv.py
    _mxfp8_quant_store_qkv_kernel.
    """
    blocks = _split(x, 32)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = (amax / E4M3FN.max).log2().ceil().clamp(-127, 127).exp2()
    return (round_to_format(blocks / scale, E4M3FN) * scale).flatten(-2)


def latent_tiles(x: torch.Tensor) -> torch.Tensor:
    """Store latents in E4M3 with an fp32 scale for 128 values.

    Read in vLLM's csrc/cache_kernels.cu concat_and_cache_ds_mla_kernel. SGLang 0.5.23
    kernels/ops/quantization/dsa_quant_k_cache.py stores the same layout by a kernel in Triton,
    which multiplies by the reciprocal of the scale: few codes differ.
    """
    tiles = _split(x, 128)
    scale = (tiles.abs().amax(-1, keepdim=True) / E4M3FN.max).clamp(min=_FP32.tiny)
    return (round_to_format(tiles / scale, E4M3FN) * scale).flatten(-2)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Store the rotary part of latents in bfloat16."""
    return x.bfloat16().float()


def first_update(x: torch.Tensor, is_prompt: torch.Tensor | None = None) -> torch.Tensor:
    """Store [B, H, S, D] in E4M3 by the amax of each sequence's prompt; later tokens clip.

    `is_prompt`, bool [B, S], tells which tokens are the first update; None: all. Read and run in
    transformers 5.23.0: cache_utils.py Fp8QuantizedLayer.
    """
    prompt = x if is_prompt is None else x.where(is_prompt[:, None, :, None], 0)
    amax = amax_over(prompt.flatten(-3), -1)[..., None, None, None]
    scale = (amax / E4M3FN.max).clamp(min=_FP32.tiny)
    return round_to_format(x.float() / scale, E4M3FN) * scale


def int8_vectors(x: torch.Tensor) -> torch.Tensor:
    """Store in 8-bit integers with a scale for each vector, halves away from zero."""
    scale = (amax_over(x, -1).unsqueeze(-1) / 127.0).clamp(min=1e-6)
    return _round_half_away(x.float() * scale.reciprocal()).clamp(-128, 127) * scale


def int4_vectors(x: torch.Tensor) -> torch.Tensor:
    """Rotate, and store in 4-bit integers with a scale and a zero point for each vector.

    What the kernel multiplies is rotated, as q is; rotated back it is the same K and V.
    """
    return rotate_back(int4_as_rotated(rotate_randomly(x)))


def int4_as_rotated(x: torch.Tensor) -> torch.Tensor:
    """Store rotated vectors; what is read back is still rotated.

    Read in vLLM 0.32.0 v1/attention/ops/int4_per_token_head.py _reshape_cache_int4_kernel,
    _attn_packed.
    """
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero_point = _round_half_away(-low / scale).clamp(0, 15)
    codes = _round_half_away(x * scale.reciprocal() + zero_point).clamp(0, 15)
    # The lowest four bits of the scale hold the zero point.
    stored = (scale.view(torch.int32) & ~0xF).view(torch.float32)
    return (codes - zero_point) * stored


def uniform_value(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Store V in 2**bits equal steps from its smallest to its largest value.

    Step and smallest value are kept in fp16; the codes are computed before they are rounded to it.
    Read, as `gaussian_key`, in vLLM 0.32.0 v1/attention/ops/triton_turboquant_store.py and
    triton_turboquant_decode.py.
    """
    x = x.float()
    last = 2**bits - 1
    low = x.amin(-1, keepdim=True)
    step = ((x.amax(-1, keepdim=True) - low) / last).clamp(min=1e-8)
    codes = ((x - low) / step + 0.5).trunc().clamp(0, last)
    read: torch.Tensor = codes * step.half().float() + low.half().float()
    return read


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.copysign(torch.tensor(0.5, device=x.device), x)).trunc()


def gaussian_key(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Store K's direction, rotated, in `bits` a value, and its length in fp16."""
    x = x.float()
    levels = find_gaussian_levels(x.shape[-1], bits).to(x.device)
    norm = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True).float()
    direction = hadamard(x / (norm + 1e-8))
    found = _take_nearest(direction, levels, halves_up=True)
    squares = found.double().square().sum(-1, keepdim=True).float()
    length = (squares + 1e-16).double().sqrt().float()  # torch's fp32 root is an ulp off
    return hadamard(norm.half().float() * (found * length.reciprocal()))


@lru_cache
def find_gaussian_levels(size: int, bits: int) -> torch.Tensor:
    """Find the levels that round a normal variable of variance 1 / size best: fp32 [2**bits].

    Lloyd and Max: a level is the mean of what is nearest to it. The means are those of the
    trapezoidal rule, as the engine computes them: vLLM 0.32.0
    model_executor/layers/quantization/turboquant/centroids.py.
    """
    sigma = 1 / math.sqrt(size)
    half_width = 3.5 * sigma
    places = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = (2 * places - 1) * half_width
    outer = torch.tensor([3 * half_width], dtype=torch.float64)
    shares = torch.linspace(0, 1, 201, dtype=torch.float64)
    for _ in range(200):
        edges = torch.cat([-outer, (levels[1:] + levels[:-1]) / 2, outer])
        x = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * shares
        density = torch.exp(-x.square() / (2 * sigma**2))
        means = torch.trapezoid(x * density, x) / torch.trapezoid(density, x)
        if bool((means - levels).abs().max() < 1e-10):
            break
        levels = means
    found: torch.Tensor = levels.float()
    return found


def nvfp4(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Store in E2M1 with an E4M3 scale for 16 values, which is divided by the global `scale`, [].

    Read in FlashInfer 0.7.2 include/flashinfer/page.cuh nvfp4_append_quantize_block.
    """
    blocks = _split(x, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    of_block = round_to_format(amax * (_E2M1_MAX * scale).reciprocal(), E4M3FN)
    return _store_e2m1(blocks, of_block * scale).flatten(-2)


def nvfp4_four_over_six(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Store as `nvfp4` does, the largest value of a block at 6 or at 4.

    What has the smaller squared error is taken; of equal ones 6. Read in FlashInfer 0.7.2
    csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh cvt_warp_fp16_to_fp4, with exact
    quotients where the kernel has approximate ones.
    """
    blocks = _split(x, 16)
    by_six = blocks.abs().amax(-1, keepdim=True) / _E2M1_MAX * scale.reciprocal()
    six, four = (
        _store_e2m1(blocks, round_to_format(by_six * factor, E4M3FN) * scale)
        for factor in (1.0, 1.5)
    )
    errors = [(read - blocks).square().sum(-1, keepdim=True) for read in (six, four)]
    return torch.where(errors[1] < errors[0], four, six).flatten(-2)


def _store_e2m1(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 by the scale of each block, halves to even; a scale of zero makes zeros."""
    factor = torch.where(scale > 0, scale.reciprocal().clamp(max=_FP32.max), 0.0)
    codes = (blocks * factor).clamp(-_E2M1_MAX, _E2M1_MAX)
    large = codes.abs()
    steps = torch.where(large < 2, 0.5, torch.where(large < 4, 1.0, 2.0))
    return (codes / steps).round() * steps * scale


def ultraquant(x: torch.Tensor) -> torch.Tensor:
    """Store in E2M1 with a power of two for 32 values.

    Read in vLLM 0.32.0 v1/attention/ops/ultraquant/reference.py ultraquant_encode; the factor of
    the largest magnitude of a block is that of format.py there.
    """
    blocks = _split(x, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = (amax * 0.156).log2().add(0.5).floor().clamp(-126, 127)
    scale = torch.where(amax > 0, exponent.exp2(), 1.0)
    levels = torch.tensor([*(-level for level in _LEVELS[:0:-1]), *_LEVELS], device=x.device)
    return (_take_nearest(blocks / scale, levels, halves_up=False) * scale).flatten(-2)


def ultraquant_key(x: torch.Tensor) -> torch.Tensor:
    """Store K rotated."""
    return hadamard(ultraquant(hadamard(x.float())))


def ultraquant_query(x: torch.Tensor) -> torch.Tensor:
    """Round the rotated q to E4M3, as it multiplies the rotated K."""
    return hadamard(round_to_format(hadamard(x.float()), E4M3FN))


def mx_block16(x: torch.Tensor) -> torch.Tensor:
    """Store in E2M1 with a power of two for 16 values, rounded up; halves away from zero.

    Read in SGLang 0.5.23 srt/layers/quantization/kvfp4_tensor.py FP4MXBlock16KVQuantizeUtil.
    """
    blocks = _split(x, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (amax / _E2M1_MAX).clamp(min=1e-10).log2().ceil().exp2()
    codes = blocks / scale
    large = _take_nearest(codes.abs(), torch.tensor(_LEVELS, device=x.device), halves_up=True)
    return (torch.copysign(large, codes) * scale).flatten(-2)


def _take_nearest(x: torch.Tensor, levels: torch.Tensor, *, halves_up: bool) -> torch.Tensor:
    middles = (levels[1:] + levels[:-1]) / 2
    # torch warns of layouts that are not contiguous
    return levels[torch.bucketize(x.contiguous(), middles, right=halves_up)]


def _split(x: torch.Tensor, size: int) -> torch.Tensor:
    """Split vectors [..., D] into blocks: fp32 [..., D / size, size]."""
    return x.float().reshape(*x.shape[:-1], -1, size)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotate fp32 vectors by the orthonormal Hadamard matrix, which is its own inverse.

    Where D is no power of two, blocks of the largest one that divides it are rotated apart.
    """
    return (_sum_by_signs(x) / math.sqrt(_find_block(x))).reshape(x.shape)


def rotate_randomly(x: torch.Tensor) -> torch.Tensor:
    """Rotate vectors by the Hadamard matrix after random signs, to sqrt(block) the length.

    On a GPU the product takes bfloat16 and gives bfloat16, whatever the model's dtype is
    (`fast_hadamard_transform`).
    """
    root = math.sqrt(_find_block(x))
    unit = _sum_by_signs((x.float() * _find_signs(x)).bfloat16().float()) / root
    return (unit.bfloat16().float() * root).reshape(x.shape).to(x.dtype)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Undo `rotate_randomly` in fp32."""
    return (_sum_by_signs(x) / _find_block(x)).reshape(x.shape) * _find_signs(x)


def _find_block(x: torch.Tensor) -> int:
    """Find the largest power of two that divides D."""
    return x.shape[-1] & -x.shape[-1]


def _sum_by_signs(x: torch.Tensor) -> torch.Tensor:
    """Multiply by the matrix of ones and minus ones, rounded once: fp32 [..., D / block, block].

    With sums in fp32 their order would decide ties of four-bit codes, and a model amplifies one.
    """
    blocks = _split(x, _find_block(x)).double()
    return torch.matmul(blocks, _make_matrix(blocks.shape[-1]).to(x.device)).float()


@lru_cache
def _make_matrix(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return matrix


def _find_signs(x: torch.Tensor) -> torch.Tensor:
    """Find the signs of all values: vLLM 0.32.0 int4_per_token_head.py _get_rht_signs."""
    block = _find_block(x)
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = 2 * torch.bernoulli(torch.full((block,), 0.5), generator=generator) - 1
    return signs.repeat(x.shape[-1] // block).to(x.device)
