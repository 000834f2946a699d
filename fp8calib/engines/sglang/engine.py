"""SGLang."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.engines.engine import SCALE_FACTOR, Engine, Launch
from fp8calib.engines.facts.release import SGLANG_RELEASES, Release, explain_type
from fp8calib.engines.numerics import FLASH_ATTENTION_3, SMALLEST_GROUP_SCALE, Numerics
from fp8calib.engines.status import Status
from fp8calib.engines.weights.weight_rule import NameRules, WeightRule
from fp8calib.numerics.formats import E4M3FNUZ, E5M2

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.reader import LinearReader
    from fp8calib.model.shapes import ModelGeometry


_KERNELS_READ = "kernels and functions that Numerics names are those of 0.5.23"


def _replay_folder(
    release: Release, folder: ScaleFolder, geometry: ModelGeometry, tp: int
) -> EngineReport:
    from fp8calib.engines.sglang.replay import replay_sglang  # noqa: PLC0415

    return replay_sglang(folder, geometry, tp, release)


def _replay_json(
    release: Release, path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    from fp8calib.engines.sglang.scales_file import replay_sglang_json  # noqa: PLC0415

    return replay_sglang_json(path, geometry, tp, model, release)


_POOL = "SGLang 0.5.23 srt/mem_cache/memory_pool.py MHATokenToKVPool.set_kv_buffer"
_FUSED = (
    "SGLang 0.5.23 srt/layers/quantization/compressed_tensors/schemes/"
    "compressed_tensors_w8a8_fp8.py process_weights_after_loading"
)
_REQUANTIZE = "SGLang 0.5.23 srt/layers/quantization/utils.py requantize_with_max_scale"
_NUMERICS = Numerics(
    name="sglang",
    kv_in_model_dtype=True,
    kv_unsaturated=frozenset({E4M3FNUZ.name, E5M2.name}),
    kv_per_head=False,
    kv_scales_latents=False,
    kv_shared_own_scale=True,
    kv_sparse_in_tiles="in its DSA backends on NVIDIA, but not TRT-LLM's or TileLang's",
    kv_misread_latents=frozenset({"modelopt"}),
    quantizes_query=True,
    query_unscaled=True,
    probability_factor=256.0,
    probability_tiles=((64, 160), (96, 128), (128, 160), (192, 160), (256, 128)),
    input_by_reciprocal=True,
    token_by_reciprocal=True,
    token_scale_by_reciprocal=True,
    smallest_group_scale=SMALLEST_GROUP_SCALE,
    fused_share_scales=True,
    weights_through_float16=True,
    sources={
        "kv_sparse_in_tiles": "SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py "
        "calculate_mla_kv_cache_dim",
        "kv_shared_own_scale": "SGLang 0.5.23 srt/models/gemma3n_causal.py, gemma4_causal.py "
        "(kv_shared_layer_index is the layer_id of a RadixAttention with scales of its own)",
        "kv_in_model_dtype": f"{_POOL} (div_ with a 0-dim fp32 tensor); "
        "kernels/ops/kvcache/cache_move.py says that it rounds the divisor first",
        "kv_unsaturated": f"{_POOL} (to, without a clamp); what torch's cast does: "
        "kernels/ops/quantization/fp8_kernel.py saturate_to_fp8_range",
        "kv_per_head": "SGLang 0.5.23 srt/layers/quantization/compressed_tensors/"
        "compressed_tensors.py CompressedTensorsKVCacheMethod.is_supported_scheme",
        "kv_scales_latents": "SGLang 0.5.23 srt/model_loader/weight_utils.py "
        "maybe_remap_kv_scale_name: to .attn, and MLA models have attn_mqa and attn_mha",
        "kv_misread_latents": "SGLang 0.5.23 srt/mem_cache/memory_pool.py MLATokenToKVPool (a cast "
        "without a scale); srt/layers/attention/trtllm_mla_backend.py _compute_decode_bmm1_scale, "
        "flashmla_backend.py",
        "quantizes_query": "SGLang 0.5.23 srt/layers/attention/flashattention_backend.py "
        "prepare_paged_mha_query (Hopper's default), trtllm_mha_backend.py (Blackwell's); "
        "flashinfer and triton leave q alone",
        "query_unscaled": "SGLang 0.5.23 srt/layers/attention/flashattention_backend.py "
        "prepare_paged_mha_query: q.to(self.kv_cache_dtype)",
        "probability_factor": f"{FLASH_ATTENTION_3}, of which SGLang builds a fork",
        "probability_tiles": "sgl-project/sgl-flash-attn 30c1d5f hopper/tile_size.h "
        "tile_size_fwd_sm90 (pages of one token: paged_kv_non_TMA)",
        "prompt_reads_cache": "SGLang 0.5.23 srt/layers/attention/flashattention_backend.py "
        "forward_extend, forward_decode: both write the cache, then read it with q in FP8; in "
        "flashinfer_backend.py (ragged) and triton_backend.py a prompt sees itself in 16 bits",
        "input_by_reciprocal": "SGLang 0.5.23 kernels/jit/csrc/gemm/per_tensor_quant_fp8.cuh "
        "per_tensor_quant_fp8_kernel",
        "token_by_reciprocal": "SGLang 0.5.23 kernels/jit/csrc/gemm/per_token_quant_fp8.cuh "
        "per_token_quant_fp8_warp_kernel",
        "token_scale_by_reciprocal": "SGLang 0.5.23 kernels/ops/quantization/"
        "per_token_quant_fp8.py (--use_fast_math on Hopper)",
        "smallest_group_scale": "SGLang 0.5.23 kernels/ops/quantization/fp8_kernel.py "
        "sglang_per_token_group_quant_fp8: eps bounds the amax",
        "fused_share_scales": f"{_FUSED}; {_REQUANTIZE}",
        "weights_through_float16": f"{_REQUANTIZE}, per_tensor_dequantize",
    },
)


def _make_reader(release: Release, folder: ScaleFolder, geometry: ModelGeometry) -> LinearReader:
    from fp8calib.engines.sglang.linears import SglangReader  # noqa: PLC0415

    return SglangReader.open(folder, geometry, release)


_WEIGHT_RULES = (
    WeightRule(
        dialect="modelopt",
        schemes=("fp8-dynamic", "fp8-block"),
        not_mixed=("fp8-block",),
        status=Status.REFUSED,
        why="it loads ModelOpt's FP8 weights only with one scale per tensor",
        source="SGLang 0.5.23 srt/layers/quantization/modelopt_quant.py (ModelOptFp8Config)",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        has_experts=True,
        status=Status.REFUSED,
        why="it runs no FP8 experts whose inputs are not quantized",
        source="SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)",
    ),
    *(
        WeightRule(
            dialect=dialect,
            schemes=("mxfp8",),
            model_types=("llama", "mistral", "ministral3", "phi3", "internlm3", "teleflm"),
            status=Status.MISREAD,
            why="its Llama classes look for their scales under a name that MXFP8 linears do not "
            "have, and leave them 0 with a warning",
            source="SGLang 0.5.23 srt/models/llama.py (_legacy_load_weights), read",
        )
        for dialect in ("modelopt", "mxfp8")
    ),
    WeightRule(
        schemes=("mxfp8",),
        status=Status.USED,
        why="it runs MXFP8 on Blackwell and gfx95x; on MI300 it converts it to blocks of 128",
        source="SGLang 0.5.23 srt/layers/quantization/fp8.py (Fp8Config.get_min_capability)",
    ),
    WeightRule(
        model_types=("olmo",),
        endings=tuple(f".self_attn.{name}_proj" for name in "qkvo"),
        status=Status.REFUSED,
        why="it has no place for their scales, and stops",
        ignore=tuple(f"*.self_attn.{name}_proj" for name in "qkvo"),
        source="SGLang 0.5.23 srt/models/olmo.py (OlmoAttention, load_weights)",
    ),
    WeightRule(
        model_types=("step3p5",),
        endings=(".self_attn.g_proj",),
        status=Status.MISREAD,
        why="it leaves their scales out without an error, and its answers are wrong",
        ignore=("*.self_attn.g_proj",),
        source="SGLang 0.5.23 srt/models/step3p5.py (g_proj, load_weights)",
    ),
)

_NAME_RULES = NameRules(
    is_silent=True,  # srt/model_loader/loader.py load_weights_and_postprocess compares nothing
    bare_types=("gpt2",),
    tied_types=("gemma", "gemma2", "gemma3_text", "gemma3n_text"),  # not read
)


def _make_engine(release: Release) -> Engine:
    return Engine(
        key="sglang",
        minor_parts=3,
        title="SGLang",
        version=release.version,
        evidence=release.evidence,
        launch=Launch(
            command="python -m sglang.launch_server --model-path",
            kv_flag="--kv-cache-dtype fp8_e4m3",
            ranks_flag="--tp-size",
        ),
        numerics=_NUMERICS,
        cache_types=release.list_values("--kv-cache-dtype"),
        scale_factor=float(release.list_values(SCALE_FACTOR)[0].partition(" on ")[0]),
        replay_folder=partial(_replay_folder, release),
        replay_json=partial(_replay_json, release),
        explain_type=partial(explain_type, release),
        splits_heads=True,
        make_reader=partial(_make_reader, release),
        weight_rules=_WEIGHT_RULES,
        name_rules=_NAME_RULES,
    )


_OLDER = tuple(
    replace(
        _make_engine(release),
        key=f"sglang=={release.version}",
        loads_like="sglang",
        numerics=_NUMERICS if release.has(_KERNELS_READ) else None,
        no_numerics="the arithmetic of this release has not been read; --engine sglang is newer",
    )
    for release in reversed(SGLANG_RELEASES[:-1])
)
SGLANG = replace(_make_engine(SGLANG_RELEASES[-1]), is_default=True, releases=_OLDER)
