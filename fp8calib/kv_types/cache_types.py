"""The types of a KV cache that need no scale for a whole tensor, as data: one record for each.

FP8 with a scale for a tensor or a head is not among them: `verification/emulation/kv.py` emulates
it. Which release of an engine has a type, and which backend, is in `engines/facts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fp8calib.kv_types import e4m3, fp4, per_token_head, turboquant
from fp8calib.numerics.schemes import Granularity

RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""Stores vectors of tokens and heads [..., D] and reads them back: fp32 of that shape."""
CountBytes = Callable[[int], float]
"""Counts the bytes of a vector of D values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheType:
    """How an engine stores K and V."""

    name: str
    """The value of `--kv-cache-dtype`."""
    description: str
    key: Callable[..., torch.Tensor]
    """A `RoundTrip`; of a type with global scales, that of the layer is its argument `scale`."""
    value: Callable[..., torch.Tensor]
    """The same."""
    per: Granularity = Granularity.TOKEN
    """What shares a scale: the values of a token and head, or a group of them; of `TENSOR` those of
    a sequence, and `key` and `value` take `is_prompt` where they are those of a prompt."""
    query: RoundTrip | None = None
    """What happens to q; None: nothing."""
    count_key_bytes: CountBytes
    count_value_bytes: CountBytes
    head_multiple: int = 1
    """Head sizes are multiples of it; of latents, that of the part without positions is."""
    latent_types: tuple[str, ...] = ()
    """The model types whose latents it stores; empty for a type that stores heads."""
    needs_power_of_two: bool = False
    """Head sizes are powers of two."""
    num_plain_ends: int = 0
    """How many attention layers at either end stay in 16 bits, where all layers are attention."""
    refused_types: tuple[str, ...] = ()
    """The model types with which the engine does not start."""
    prompt_in_16_bits: bool = False
    """Whether attention of a prompt reads K, V and q as they were before they are stored."""
    has_global_scales: bool = False
    """Whether k_scale and v_scale are used: what the scales of blocks are divided by. They are
    those of an FP8 cache (`formats.NVFP4_CACHE`)."""
    is_kernel_run: bool = False
    """Whether the codes were compared with the engine's kernel, bit for bit."""
    note: str = ""
    """What the emulation leaves out."""

    def explain_misfit(self, head_size: int) -> str:
        """Say why heads of a size cannot be stored; empty where they can."""
        if head_size % self.head_multiple:
            return f"its heads have {head_size} values, no multiple of {self.head_multiple}"
        if self.needs_power_of_two and head_size & (head_size - 1):
            return f"its heads have {head_size} values, no power of two"
        return ""


def _with_fp32_scale(bits: int) -> CountBytes:
    """Count the bytes of values of so many bits, and an fp32 scale."""
    return lambda size: size * bits / 8 + 4


def _in_blocks(bits: int, block: int) -> CountBytes:
    """Count the bytes of values of so many bits, and a byte for each block."""
    return lambda size: size * bits / 8 + size / block


_PLAIN_ENDS = "the first and last two layers in 16 bits"
"""Of two types: vLLM 0.32.0 engine/arg_utils.py (`uses_packed_kv_backend`)."""
_MIXED_TYPES = ("falcon_h1",)
"""Of the same: hybrid models without a layer of attention alone, at which vLLM 0.32.0
quantization/turboquant/config.py get_boundary_skip_layers stops (NotImplementedError), run."""
_PROMPT_NOTE = (
    "attention of a prompt is in 16 bits; these figures are those of decoding alone, and --decode "
    "scores a prompt with what follows"
)
"""Of the same: vLLM 0.32.0 v1/attention/backends/turboquant_attn.py, ultraquant_attn.py
(`_prefill_attention`, of a prompt in one chunk)."""


def _make_per_token_head(
    name: str, stores: str, store: RoundTrip, bits: int, *, head_multiple: int = 1
) -> CacheType:
    return CacheType(
        name=f"{name}_per_token_head",
        description=f"{stores} each token and head",
        key=store,
        value=store,
        count_key_bytes=_with_fp32_scale(bits),
        count_value_bytes=_with_fp32_scale(bits),
        head_multiple=head_multiple,
        is_kernel_run=True,
    )


def _make_nvfp4(name: str, description: str, store: Callable[..., torch.Tensor]) -> CacheType:
    return CacheType(
        name=name,
        description=description,
        key=store,
        value=store,
        count_key_bytes=_in_blocks(4, fp4.NVFP4_BLOCK),
        count_value_bytes=_in_blocks(4, fp4.NVFP4_BLOCK),
        per=Granularity.GROUP,
        head_multiple=fp4.NVFP4_BLOCK,
        has_global_scales=True,
        note="on B200 q is rounded to E4M3 too, in vLLM also what attention gives: left out",
    )


def _make_turboquant(name: str, key_bits: int, value_bits: int) -> CacheType:
    is_fp8 = key_bits == 8
    key = "E4M3 at 1.0" if is_fp8 else f"rotated, {key_bits}-bit levels of a Gaussian"
    return CacheType(
        name=name,
        description=f"K {key}; V {value_bits}-bit integers per token and head; {_PLAIN_ENDS}",
        key=turboquant.fp8_key if is_fp8 else partial(turboquant.gaussian_key, bits=key_bits),
        value=partial(turboquant.uniform_value, bits=value_bits),
        count_key_bytes=(lambda size: size) if is_fp8 else (lambda size: size * key_bits / 8 + 2),
        count_value_bytes=_with_fp32_scale(value_bits),
        head_multiple=8,
        needs_power_of_two=True,
        num_plain_ends=2,
        refused_types=_MIXED_TYPES,
        prompt_in_16_bits=True,
        is_kernel_run=True,
        note=_PROMPT_NOTE,
    )


CACHE_TYPES = {
    each.name: each
    for each in (
        _make_per_token_head("fp8", "E4M3, a scale for", per_token_head.fp8, 8),
        _make_per_token_head("int8", "8-bit integers, a scale for", per_token_head.int8, 8),
        _make_per_token_head(
            "int4",
            "rotated, 4-bit integers, a scale and a zero point for",
            per_token_head.int4,
            4,
            head_multiple=2,
        ),
        _make_nvfp4(
            "nvfp4",
            "E2M1, an E4M3 scale for 16 values, a global scale for each layer",
            fp4.nvfp4,
        ),
        _make_nvfp4(
            "nvfp4_4over6",
            "as nvfp4, the largest of 16 values stored as 6 or as 4",
            fp4.nvfp4_four_over_six,
        ),
        _make_turboquant("turboquant_k8v4", 8, 4),
        _make_turboquant("turboquant_4bit_nc", 4, 4),
        _make_turboquant("turboquant_k3v4_nc", 3, 4),
        _make_turboquant("turboquant_3bit_nc", 3, 3),
        CacheType(
            name="ultraquant_4bit",
            description="E2M1, a power of two for 32 values, K and q rotated, q in E4M3; "
            f"{_PLAIN_ENDS}",
            key=fp4.ultraquant_key,
            value=fp4.ultraquant,
            query=fp4.ultraquant_query,
            count_key_bytes=_in_blocks(4, fp4.ULTRA_BLOCK),
            count_value_bytes=_in_blocks(4, fp4.ULTRA_BLOCK),
            per=Granularity.GROUP,
            head_multiple=fp4.ULTRA_BLOCK,
            needs_power_of_two=True,
            num_plain_ends=2,
            refused_types=_MIXED_TYPES,
            prompt_in_16_bits=True,
            is_kernel_run=True,
            note=_PROMPT_NOTE,
        ),
        CacheType(
            name="mxfp8",
            description="E4M3, a power of two for 32 values of K, V and q",
            key=e4m3.mxfp8,
            value=e4m3.mxfp8,
            query=e4m3.mxfp8,
            count_key_bytes=_in_blocks(8, e4m3.MXFP8_BLOCK),
            count_value_bytes=_in_blocks(8, e4m3.MXFP8_BLOCK),
            per=Granularity.GROUP,
            head_multiple=e4m3.MXFP8_BLOCK,
            is_kernel_run=True,
        ),
        CacheType(
            name="fp4_mx_block16",
            description="E2M1, a power of two for 16 values",
            key=fp4.mx_block16,
            value=fp4.mx_block16,
            count_key_bytes=_in_blocks(4, fp4.MX_BLOCK16),
            count_value_bytes=_in_blocks(4, fp4.MX_BLOCK16),
            per=Granularity.GROUP,
            head_multiple=fp4.MX_BLOCK16,
            is_kernel_run=True,
        ),
        CacheType(
            name="fp8_ds_mla",
            description="latents in E4M3, a scale for 128 values; the rotary part in 16 bits",
            key=e4m3.latent_tiles,
            value=e4m3.rotary,
            count_key_bytes=lambda size: size + 4 * size / e4m3.TILE,
            count_value_bytes=lambda size: 2 * size,
            per=Granularity.GROUP,
            head_multiple=e4m3.TILE,
            latent_types=("deepseek_v32", "glm_moe_dsa"),
        ),
        CacheType(
            name="fp8_quantized_cache",
            description="transformers' QuantizedCache in E4M3, a scale for the first update",
            key=e4m3.first_update,
            value=e4m3.first_update,
            count_key_bytes=lambda size: size,
            count_value_bytes=lambda size: size,
            per=Granularity.TENSOR,
            prompt_in_16_bits=True,
            note=f"{_PROMPT_NOTE}, by the scale of the prompt; here it is that of the sequence",
        ),
    )
}
LATENT_TILES = "fp8_ds_mla"
FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of the type with a scale for each layer, which every report has."""
E5M2_CACHE = "fp8_e5m2"
EMULATED = (*FP8_CACHES, E5M2_CACHE, *CACHE_TYPES)
"""All types that are emulated."""


def explain_not_emulated(name: str) -> str:
    """Say why `verify` does not emulate a type that an engine offers."""
    if name.endswith("_ds_mla"):
        return "it stores latents in blocks of 16, by kernels in CUDA that cannot run here"
    if name.startswith("octave"):
        return "its kernels are in HIP for MI300X, and cannot run here"
    if name == "fp8_inc":
        return "it is FP8 on Gaudi, where no scale of a file is used"
    if name == "fp4_e2m1":
        return "SGLang's older name of fp4_mx_block16"
    return "its kernels were not compared with an emulation yet"
