"""What TGI computes when it serves in FP8."""

from __future__ import annotations

from fp8calib.engines.numerics import SMALLEST_TOKEN_SCALE, Numerics

_CACHE = "TGI 065f87a server/text_generation_server/layers/attention/kv_cache.py"
_FP8 = "TGI 05d0aa6 server/text_generation_server/layers/fp8.py"
_MARLIN = "danieldk/marlin-kernels 0e1f9d6 csrc/quantization/fp8/common.cu"
_BFLOAT16_TYPES = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "dbrx", "deepseek_v2", "deepseek_v3"),
)
"""Model types that TGI serves in bfloat16 without `--dtype`; the others it serves in float16,
whatever the checkpoint's dtype is."""
NUMERICS = Numerics(
    name="tgi",
    kv_by_reciprocal=True,
    kv_saturates_unscaled=False,
    kv_scales_e5m2=False,
    kv_per_head=False,
    kv_joint_dtypes={"": "float16", **dict.fromkeys(_BFLOAT16_TYPES, "bfloat16")},
    static_inputs_ignored=True,
    inputs_always_quantized=True,
    smallest_dynamic_scale=SMALLEST_TOKEN_SCALE,
    sources={
        "kv_by_reciprocal": f"{_CACHE} KVCache.store; {_MARLIN} scaled_fp8_quant_kernel",
        "kv_saturates_unscaled": f"{_CACHE} KVCache.store: scales of 1.0 leave the "
        "cast to torch (2.4 to 2.7, whose e4m3fn overflows to NaN)",
        "kv_scales_e5m2": f"{_CACHE} KVCache.can_scale",
        "kv_per_head": f"{_CACHE} KVScales.__post_init__",
        "kv_joint_dtypes": f"{_CACHE} get_kv_scales: get_tensor casts; "
        "TGI db931fc models/__init__.py get_model, models/flash_causal_lm.py (default_dtype)",
        "prompt_reads_cache": "TGI db931fc server/text_generation_server/layers/attention/cuda.py "
        "attention with flashinfer: the paged cache and its scales; with ATTENTION=paged a prompt "
        "sees itself in 16 bits",
        "static_inputs_ignored": f"{_FP8} Fp8Linear.forward, wherever cutlass has FP8 "
        "(Hopper; older GPUs leave inputs alone)",
        "inputs_always_quantized": f"{_FP8} get_fp8_linear: on Hopper Marlin runs only with "
        "force_w8a16, which layers/compressed_tensors/w8an_fp.py sets where input_activations has "
        "16 bits, not where it is null (older GPUs leave inputs alone)",
        "smallest_dynamic_scale": f"{_MARLIN} dynamic_per_token_scaled_fp8_quant_kernel",
    },
)
