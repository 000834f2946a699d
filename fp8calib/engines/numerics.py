"""What each engine does to tensors when it serves in FP8, as data.

A profile says where an engine differs from the plain rule (divide in fp32, saturate, round to
nearest even; every scale of the file is used, and nothing is quantized that has none). `sources`
names, for every field that is not the plain rule, the file it was read from. What depends on the
GPU is taken from Hopper, with the backends the engine picks there by itself.

Paths are those of the installed package, or of the engine's repository for kernels that no wheel
carries: of these the repository holds no tags here, so they are the newest version at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8calib.errors import UsageError
from fp8calib.fp8.cast import Rounding
from fp8calib.fp8.formats import E4M3FN, E4M3FNUZ, E5M2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """How one engine quantizes; the defaults are the plain rule."""

    name: str
    version: str
    kv_rounding: Rounding = Rounding.NEAREST_EVEN
    """How the KV cache write rounds."""
    kv_by_reciprocal: bool = False
    """K and V are multiplied by 1 / scale (fp32) rather than divided."""
    kv_in_model_dtype: bool = False
    """K and V are divided in the model's dtype, the scale rounded to it first and the quotient
    after; what is read back is multiplied by the scale as it was in the file."""
    kv_unsaturated: frozenset[str] = frozenset()
    """Formats whose cache write does not saturate: what rounds to more than the largest value
    becomes infinity where the format has one, else NaN."""
    kv_saturates_unscaled: bool = True
    """K and V saturate with a scale of exactly 1.0 too; where not, they become NaN."""
    kv_scales_e5m2: bool = True
    """An e5m2 cache uses scales; where not, they are refused or taken for 1.0."""
    kv_per_head: bool = True
    """Per-head scales are honoured; where not, the engine refuses them."""
    kv_heads_share_largest: bool = False
    """Per-head scales are read, and the largest of a layer serves all its heads."""
    kv_joint_scale: bool = False
    """One scale serves k and v of a layer: the larger of the two."""
    kv_joint_in_model_dtype: bool = False
    """A scale that the file holds for k and v together is rounded to the model's dtype."""
    kv_scales_latents: bool = True
    """The cache of latent attention (MLA) uses scales; where not, they are taken for 1.0."""
    quantizes_query: bool = False
    """q is quantized statically when the KV cache is FP8, with `q_scale` or 1.0."""
    query_by_reciprocal: bool = False
    """q is multiplied by 1 / scale (fp32) rather than divided."""
    query_unscaled: bool = False
    """q is quantized with 1.0 whatever the file says."""
    static_inputs_ignored: bool = False
    """Static input scales are dropped: such inputs are quantized per token."""
    input_by_reciprocal: bool = False
    """Static activations are multiplied by 1 / scale (fp32) rather than divided."""
    token_by_reciprocal: bool = False
    """Activations quantized per token are multiplied by 1 / scale (fp32) rather than divided."""
    smallest_dynamic_scale: float = 0.0
    """Lower bound of a per-token scale."""
    smallest_group_scale: float = 0.0
    """Lower bound of the scale of 128 channels of a token."""
    group_scales_power_of_two: bool = False
    """Scales of 128 channels are rounded up to powers of two, and so are those of 128 x 128
    weights, which are quantized again."""
    fused_share_scales: bool = False
    """Projections fused at load (q/k/v, gate/up) take the largest of their static input scales, and
    per-tensor weights are quantized again with the largest of theirs."""
    weights_through_float16: bool = False
    """Per-tensor weights, fused or not, are dequantized to fp16 at load and quantized again with
    their (largest) scale: what fp16 flushes to zero is lost."""
    kv_skip_flag: str = ""
    """The option that leaves the KV cache of some layers unquantized, their indices after it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> file (and function) it was read from."""


_VLLM = "vLLM 0.32.0"
_VLLM_FP8 = f"{_VLLM} model_executor/layers/quantization/input_quant_fp8.py QuantFP8"
_VLLM_CT = f"{_VLLM} model_executor/layers/quantization/compressed_tensors"
_VLLM_W8A8 = f"{_VLLM_CT}/schemes/compressed_tensors_w8a8_fp8.py process_weights_after_loading"
_VLLM_REQUANTIZE = (
    f"{_VLLM} model_executor/layers/quantization/utils/w8a8_utils.py requantize_with_max_scale"
)
_VLLM_E5M2 = (
    f"{_VLLM} model_executor/layers/attention/attention.py _init_kv_cache_quant: a ValueError"
)
_VLLM_MLA = (
    f"{_VLLM_CT}/compressed_tensors.py get_quant_method: Attention, not MLAAttention; read back "
    "from a loaded model"
)
_SGLANG = "SGLang 0.5.23"
_SGLANG_POOL = f"{_SGLANG} srt/mem_cache/memory_pool.py MHATokenToKVPool.set_kv_buffer"
_SGLANG_W8A8 = (
    f"{_SGLANG} srt/layers/quantization/compressed_tensors/schemes/"
    "compressed_tensors_w8a8_fp8.py process_weights_after_loading"
)
_SGLANG_REQUANTIZE = f"{_SGLANG} srt/layers/quantization/utils.py requantize_with_max_scale"
_TGI = "TGI db931fc"
_TGI_CACHE = "TGI 065f87a server/text_generation_server/layers/attention/kv_cache.py"
_TGI_FP8 = "TGI 05d0aa6 server/text_generation_server/layers/fp8.py"
_MARLIN = "danieldk/marlin-kernels 0e1f9d6 csrc/quantization/fp8/common.cu"

_VLLM_SKIP = "--kv-cache-dtype-skip-layers"
_VLLM_SKIP_SOURCE = f"{_VLLM} engine/arg_utils.py kv_cache_dtype_skip_layers"
_VLLM_SMALLEST = 1 / (E4M3FN.max * 512)
_SMALLEST_GROUP = 1e-10 / E4M3FN.max

PROFILES: Mapping[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        EngineProfile(name="reference", version="the plain rule"),
        EngineProfile(
            name="vllm",
            version=_VLLM,
            kv_scales_e5m2=False,
            kv_scales_latents=False,
            quantizes_query=True,
            query_by_reciprocal=True,
            input_by_reciprocal=True,
            token_by_reciprocal=True,
            smallest_dynamic_scale=_VLLM_SMALLEST,
            smallest_group_scale=_SMALLEST_GROUP,
            group_scales_power_of_two=True,
            fused_share_scales=True,
            weights_through_float16=True,
            kv_skip_flag=_VLLM_SKIP,
            sources={
                "kv_skip_flag": _VLLM_SKIP_SOURCE,
                "kv_scales_e5m2": _VLLM_E5M2,
                "kv_scales_latents": _VLLM_MLA,
                "quantizes_query": f"{_VLLM} model_executor/layers/attention/attention.py "
                "Attention.__init__ (query_quant); v1/attention/backends/flash_attn.py: all but "
                "FlashAttention 4 on Hopper, flashinfer.py: Blackwell alone, triton_attn.py: CUDA",
                "query_by_reciprocal": f"{_VLLM_FP8}.forward_native; vllm-project/vllm 094be77 "
                "csrc/libtorch_stable/quantization/w8a8/fp8/common.cu "
                "scaled_fp8_quant_kernel_strided_group_shape",
                "input_by_reciprocal": f"{_VLLM_FP8}.forward_native; vllm-project/vllm 094be77 "
                "csrc/libtorch_stable/quantization/w8a8/fp8/common.cu "
                "scaled_fp8_quant_kernel_strided_group_shape",
                "token_by_reciprocal": f"{_VLLM_FP8}.forward_native, which is what gets compiled; "
                "the CUDA kernel of --enforce-eager divides",
                "smallest_dynamic_scale": f"{_VLLM_FP8}.forward_native _FP8_MIN_SCALING_FACTOR",
                "smallest_group_scale": f"{_VLLM} model_executor/layers/quantization/utils/"
                "fp8_utils.py per_token_group_quant_fp8: eps bounds the amax",
                "group_scales_power_of_two": f"{_VLLM} utils/deep_gemm.py is_deep_gemm_e8m0_used "
                "(Hopper and Blackwell); model_executor/layers/quantization/utils/fp8_utils.py "
                "deepgemm_post_process_fp8_weight_block",
                "fused_share_scales": f"{_VLLM_W8A8}; {_VLLM_REQUANTIZE}",
                "weights_through_float16": f"{_VLLM_REQUANTIZE}, per_tensor_dequantize",
            },
        ),
        EngineProfile(
            name="vllm-cpu",
            version=_VLLM,
            kv_rounding=Rounding.TOWARD_ZERO,
            kv_by_reciprocal=True,
            kv_scales_e5m2=False,
            kv_heads_share_largest=True,
            kv_scales_latents=False,
            input_by_reciprocal=True,
            token_by_reciprocal=True,
            smallest_dynamic_scale=_VLLM_SMALLEST,
            fused_share_scales=True,
            weights_through_float16=True,
            kv_skip_flag=_VLLM_SKIP,
            sources={
                "kv_skip_flag": _VLLM_SKIP_SOURCE,
                "kv_rounding": "vllm-project/vllm 0f25e05 csrc/cpu/cpu_attn_fp8.hpp "
                "float_to_fp8e4m3_scalar; all bfloat16 values through the installed kernel",
                "kv_by_reciprocal": "vllm-project/vllm 0a2c686 csrc/cpu/cpu_attn.cpp "
                "cpu_attn_reshape_and_cache (k_inv, v_inv); values through the installed kernel",
                "kv_scales_e5m2": _VLLM_E5M2,
                "kv_heads_share_largest": f"{_VLLM_CT}/compressed_tensors.py "
                "CompressedTensorsKVCacheMethod.process_weights_after_loading (_k_scale_float); "
                "v1/attention/backends/cpu_attn.py forward",
                "kv_scales_latents": _VLLM_MLA,
                "input_by_reciprocal": f"{_VLLM_FP8}.forward_native",
                "token_by_reciprocal": f"{_VLLM_FP8}.forward_native",
                "smallest_dynamic_scale": f"{_VLLM_FP8}.forward_native _FP8_MIN_SCALING_FACTOR",
                "fused_share_scales": f"{_VLLM_W8A8}; {_VLLM_REQUANTIZE} (no kernel for it here)",
                "weights_through_float16": f"{_VLLM_REQUANTIZE} (no kernel for it here)",
            },
        ),
        EngineProfile(
            name="sglang",
            version=_SGLANG,
            kv_in_model_dtype=True,
            kv_unsaturated=frozenset({E4M3FNUZ.name, E5M2.name}),
            kv_per_head=False,
            kv_scales_latents=False,
            quantizes_query=True,
            query_unscaled=True,
            input_by_reciprocal=True,
            token_by_reciprocal=True,
            smallest_group_scale=_SMALLEST_GROUP,
            fused_share_scales=True,
            weights_through_float16=True,
            sources={
                "kv_in_model_dtype": f"{_SGLANG_POOL} (div_ with a 0-dim fp32 tensor); "
                "kernels/ops/kvcache/cache_move.py says that it rounds the divisor first",
                "kv_unsaturated": f"{_SGLANG_POOL} (to, without a clamp); what torch's cast does: "
                "kernels/ops/quantization/fp8_kernel.py saturate_to_fp8_range",
                "kv_per_head": f"{_SGLANG} srt/layers/quantization/compressed_tensors/"
                "compressed_tensors.py CompressedTensorsKVCacheMethod.is_supported_scheme",
                "kv_scales_latents": f"{_SGLANG} srt/model_loader/weight_utils.py "
                "maybe_remap_kv_scale_name: to .attn, and MLA models have attn_mqa and attn_mha",
                "quantizes_query": f"{_SGLANG} srt/layers/attention/flashattention_backend.py "
                "prepare_paged_mha_query (Hopper's default), trtllm_mha_backend.py (Blackwell's); "
                "flashinfer and triton leave q alone",
                "query_unscaled": f"{_SGLANG} srt/layers/attention/flashattention_backend.py "
                "prepare_paged_mha_query: q.to(self.kv_cache_dtype)",
                "input_by_reciprocal": f"{_SGLANG} kernels/jit/csrc/gemm/per_tensor_quant_fp8.cuh "
                "per_tensor_quant_fp8_kernel",
                "token_by_reciprocal": f"{_SGLANG} kernels/jit/csrc/gemm/per_token_quant_fp8.cuh "
                "per_token_quant_fp8_warp_kernel",
                "smallest_group_scale": f"{_SGLANG} kernels/ops/quantization/fp8_kernel.py "
                "sglang_per_token_group_quant_fp8: eps bounds the amax",
                "fused_share_scales": f"{_SGLANG_W8A8}; {_SGLANG_REQUANTIZE}",
                "weights_through_float16": f"{_SGLANG_REQUANTIZE}, per_tensor_dequantize",
            },
        ),
        EngineProfile(
            name="tgi",
            version=_TGI,
            kv_by_reciprocal=True,
            kv_saturates_unscaled=False,
            kv_scales_e5m2=False,
            kv_per_head=False,
            kv_joint_in_model_dtype=True,
            static_inputs_ignored=True,
            smallest_dynamic_scale=_VLLM_SMALLEST,
            sources={
                "kv_by_reciprocal": f"{_TGI_CACHE} KVCache.store; {_MARLIN} "
                "scaled_fp8_quant_kernel",
                "kv_saturates_unscaled": f"{_TGI_CACHE} KVCache.store: scales of 1.0 leave the "
                "cast to torch (2.4 to 2.7, whose e4m3fn overflows to NaN)",
                "kv_scales_e5m2": f"{_TGI_CACHE} KVCache.can_scale",
                "kv_per_head": f"{_TGI_CACHE} KVScales.__post_init__",
                "kv_joint_in_model_dtype": f"{_TGI_CACHE} get_kv_scales: get_tensor casts",
                "static_inputs_ignored": f"{_TGI_FP8} Fp8Linear.forward, wherever cutlass has FP8 "
                "(Hopper; older GPUs leave inputs alone)",
                "smallest_dynamic_scale": f"{_MARLIN} dynamic_per_token_scaled_fp8_quant_kernel",
            },
        ),
    )
}


def find_profile(name: str) -> EngineProfile:
    """Give the profile called `name`.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in PROFILES:
        raise UsageError(
            f"--engine {name}: unknown engine", hint=f"known engines: {', '.join(PROFILES)}"
        )
    return PROFILES[name]
