"""What vLLM computes on a GPU when it serves in FP8; the names of its files."""

from __future__ import annotations

from dataclasses import replace

from fp8calib.engines.facts.release import Release
from fp8calib.engines.numerics import (
    FLASH_ATTENTION_3,
    SMALLEST_GROUP_SCALE,
    SMALLEST_TOKEN_SCALE,
    Numerics,
)
from fp8calib.engines.vllm.model_types import TYPES_WITHOUT_CACHE_CONFIG

QUANT_FP8_SOURCE = "vLLM 0.32.0 model_executor/layers/quantization/input_quant_fp8.py QuantFP8"
CT_FOLDER = "vLLM 0.32.0 model_executor/layers/quantization/compressed_tensors"
_REQUANTIZE_SOURCE = (
    "vLLM 0.32.0 model_executor/layers/quantization/utils/w8a8_utils.py requantize_with_max_scale"
)
BFLOAT16_TYPES = "served in bfloat16 where the checkpoint is in float16"
_KERNELS_RUN = "GPU kernels that Numerics names were run on an H100"
_RUN_ON_GPUS = frozenset(
    {
        *("quantizes_query", "query_by_reciprocal", "probability_factor", "probability_tiles"),
        *("prompt_reads_cache", "input_by_reciprocal", "token_by_reciprocal"),
        *("token_scale_by_reciprocal", "smallest_dynamic_scale", "smallest_group_scale"),
    }
)
_KERNELS_READ = "kernels and functions that Numerics names are those of 0.32.0"

SHARED = Numerics(
    name="vllm",
    kv_scales_e5m2=False,
    kv_rounded_dialects=frozenset({"autofp8", "modelopt", "quark"}),
    kv_plain_types=TYPES_WITHOUT_CACHE_CONFIG,
    kv_scales_latents=False,
    kv_shared_own_scale=True,
    input_by_reciprocal=True,
    token_by_reciprocal=True,
    smallest_dynamic_scale=SMALLEST_TOKEN_SCALE,
    fused_share_scales=True,
    weights_through_float16=True,
    modelopt_keeps_equal_scales=True,
    kv_skip_flag="--kv-cache-dtype-skip-layers",
    sources={
        "kv_skip_flag": "vLLM 0.32.0 engine/arg_utils.py kv_cache_dtype_skip_layers",
        "kv_shared_own_scale": "vLLM 0.32.0 model_executor/models/gemma3n.py, gemma4.py "
        "(kv_sharing_target_layer_name: an Attention with scales of its own); "
        "v1/attention/backends/flash_attn.py (layer._k_scale)",
        "kv_scales_e5m2": "vLLM 0.32.0 model_executor/layers/attention/attention.py "
        "_init_kv_cache_quant: a ValueError",
        "kv_rounded_dialects": "vLLM 0.32.0 model_executor/layers/quantization/kv_cache.py "
        "KVCacheScaleParameter: a tensor of the model's default dtype; compressed-tensors' method "
        "makes its own in fp32",
        "kv_plain_types": "vLLM 0.32.0 model_executor/models/falcon.py FalconAttention: no "
        "cache_config",
        "bfloat16_types": "vLLM 0.32.0 config/model.py _FLOAT16_NOT_SUPPORTED_MODELS",
        "kv_scales_latents": f"{CT_FOLDER}/compressed_tensors.py get_quant_method: Attention, not "
        "MLAAttention",
        "smallest_dynamic_scale": f"{QUANT_FP8_SOURCE}.forward_native _FP8_MIN_SCALING_FACTOR",
        "fused_share_scales": f"{CT_FOLDER}/schemes/compressed_tensors_w8a8_fp8.py "
        f"process_weights_after_loading; {_REQUANTIZE_SOURCE}",
        "weights_through_float16": f"{_REQUANTIZE_SOURCE}, per_tensor_dequantize",
        "modelopt_keeps_equal_scales": "vLLM 0.32.0 model_executor/layers/quantization/modelopt.py "
        "KFp8StaticTensor.process",
    },
)
"""What vLLM computes on GPUs and on the CPU alike."""
_NUMERICS = replace(
    SHARED,
    kv_sparse_in_tiles="in FlashMLA's backend and on sm_120, not in FlashInfer's on B200",
    quantizes_query=True,
    query_by_reciprocal=True,
    probability_factor=256.0,
    probability_tiles=((64, 128), (96, 128), (128, 192), (192, 96), (256, 128)),
    mx_inputs_always_quantized=True,
    token_scale_by_reciprocal=True,
    smallest_group_scale=SMALLEST_GROUP_SCALE,
    group_scales_power_of_two=True,
    power_of_two_sizes=(64, 128),
    run=frozenset({"kv_rounded_dialects", "kv_plain_types", "kv_scales_latents"}),
    sources={
        **SHARED.sources,
        "kv_sparse_in_tiles": "vLLM 0.32.0 model_executor/layers/attention/mla_attention.py "
        "_canonicalize_sparse_mla_kv_cache_dtype",
        "quantizes_query": "vLLM 0.32.0 model_executor/layers/attention/attention.py "
        "Attention.__init__ (query_quant); v1/attention/backends/flash_attn.py: all but "
        "FlashAttention 4 on Hopper, flashinfer.py: Blackwell alone, triton_attn.py: ",
        "query_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native; vllm-project/vllm 094be77 "
        "csrc/libtorch_stable/quantization/w8a8/fp8/common.cu "
        "scaled_fp8_quant_kernel_strided_group_shape",
        "probability_factor": f"{FLASH_ATTENTION_3}; vLLM 0.32.0 "
        "v1/attention/ops/triton_unified_attention.py kernel_unified_attention (p_scale)",
        "probability_tiles": "vLLM 0.26.0 vllm_flash_attn/flash_attn_interface.py "
        "flash_attn_varlen_func, measured on an H100 over a paged cache",
        "prompt_reads_cache": "vLLM 0.32.0 v1/attention/backends/flash_attn.py, triton_attn.py "
        "forward: one call over the paged cache for both; flashinfer.py: also (q in 16 bits in "
        "decoding alone where XQA is forced on Hopper, get_q_data_type)",
        "mx_inputs_always_quantized": "vLLM 0.32.0 model_executor/layers/quantization/"
        "compressed_tensors/compressed_tensors.py _is_mxfp8, which looks at weights alone; on "
        "Blackwell and gfx95x only: kernels/linear/mxfp8/",
        "input_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native; vllm-project/vllm 094be77 "
        "csrc/libtorch_stable/quantization/w8a8/fp8/common.cu "
        "scaled_fp8_quant_kernel_strided_group_shape",
        "token_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native, which is what gets compiled; "
        "the CUDA kernel of --enforce-eager divides",
        "token_scale_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native (x_max / _FP8_MAX)",
        "smallest_group_scale": "vLLM 0.32.0 model_executor/layers/quantization/utils/"
        "fp8_utils.py per_token_group_quant_fp8: eps bounds the amax",
        "group_scales_power_of_two": "vLLM 0.32.0 utils/deep_gemm.py is_deep_gemm_e8m0_used "
        "(Hopper and Blackwell); model_executor/layers/quantization/utils/fp8_utils.py "
        "deepgemm_post_process_fp8_weight_block",
        "power_of_two_sizes": "vLLM 0.32.0 utils/deep_gemm.py should_use_deepgemm_for_fp8_linear; "
        "experts: model_executor/layers/fused_moe/experts/triton_deep_gemm_moe.py, all sizes",
    },
)


def name_query_gpus(release: Release) -> str:
    """Name the GPUs on which the Triton backend quantizes q."""
    return ", and ".join(release.list_values("Triton backend quantizes q on"))


def make_numerics(release: Release) -> Numerics:
    """Give the arithmetic of a release: that of 0.32.0, which was read, and what differs.

    Of older ones only Python was compared with it, and kernels where they ran on a GPU.
    """
    query = _NUMERICS.sources["quantizes_query"] + name_query_gpus(release)
    run = _NUMERICS.run if release.has(_KERNELS_READ) else frozenset()
    return replace(
        _NUMERICS,
        bfloat16_types=release.list_values(BFLOAT16_TYPES),
        sources={**_NUMERICS.sources, "quantizes_query": query},
        run=run | (_RUN_ON_GPUS if release.has(_KERNELS_RUN) else frozenset()),
    )
