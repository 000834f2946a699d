"""SGLang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.engines.engine import (
    Engine,
    Evidence,
    Launch,
    MakeLinearLoader,
    ReplayFolder,
    ReplayJson,
)
from fp8calib.engines.numerics import FLASH_ATTENTION_3, SMALLEST_GROUP_SCALE, Numerics
from fp8calib.engines.sglang.releases import EXPERTS_NARROWED_SINCE, RELEASES, Release
from fp8calib.engines.weights.weight_rule import (
    Effect,
    Outcome,
    ParameterRules,
    WeightRule,
)
from fp8calib.fp8.formats import E4M3FNUZ, E5M2

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.linear_loader import LinearLoader
    from fp8calib.geometry.model_geometry import ModelGeometry


def _make_replay(release: Release) -> ReplayFolder:
    def replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
        from fp8calib.engines.sglang.replay import replay_sglang  # noqa: PLC0415

        return replay_sglang(folder, geometry, tp, release)

    return replay_folder


def _make_json_replay(release: Release) -> ReplayJson:
    def replay_json(
        path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder
    ) -> EngineReport:
        from fp8calib.engines.sglang.scales_file import replay_sglang_json  # noqa: PLC0415

        return replay_sglang_json(path, geometry, tp, model, release)

    return replay_json


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
    kv_misread_latents=frozenset({"modelopt"}),
    quantizes_query=True,
    query_unscaled=True,
    probability_factor=256.0,
    input_by_reciprocal=True,
    token_by_reciprocal=True,
    smallest_group_scale=SMALLEST_GROUP_SCALE,
    fused_share_scales=True,
    weights_through_float16=True,
    sources={
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
        "input_by_reciprocal": "SGLang 0.5.23 kernels/jit/csrc/gemm/per_tensor_quant_fp8.cuh "
        "per_tensor_quant_fp8_kernel",
        "token_by_reciprocal": "SGLang 0.5.23 kernels/jit/csrc/gemm/per_token_quant_fp8.cuh "
        "per_token_quant_fp8_warp_kernel",
        "smallest_group_scale": "SGLang 0.5.23 kernels/ops/quantization/fp8_kernel.py "
        "sglang_per_token_group_quant_fp8: eps bounds the amax",
        "fused_share_scales": f"{_FUSED}; {_REQUANTIZE}",
        "weights_through_float16": f"{_REQUANTIZE}, per_tensor_dequantize",
    },
)


_NUMERICS_SINCE = 19
"""The first release whose kernels and functions were compared with those of 0.5.23: they differ in
nothing that `Numerics` names."""


def _make_linear_loader_factory(release: Release) -> MakeLinearLoader:
    def make_linear_loader(folder: ScaleFolder, geometry: ModelGeometry) -> LinearLoader:
        from fp8calib.engines.sglang.linear_loader import SglangLinearLoader  # noqa: PLC0415

        return SglangLinearLoader(folder, geometry, release)

    return make_linear_loader


_WEIGHT_RULES = (
    WeightRule(
        dialect="modelopt",
        schemes=("fp8-dynamic", "fp8-block"),
        not_mixed=("fp8-block",),
        effect=Effect.REFUSED,
        why="it loads ModelOpt's FP8 weights only with one scale per tensor",
        source="SGLang 0.5.23 srt/layers/quantization/modelopt_quant.py (ModelOptFp8Config)",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        has_experts=True,
        effect=Effect.REFUSED,
        why="it runs no FP8 experts whose inputs are not quantized",
        source="SGLang 0.5.23 compressed_tensors/compressed_tensors.py (get_moe_scheme)",
    ),
    WeightRule(
        model_types=("olmo",),
        endings=tuple(f".self_attn.{name}_proj" for name in "qkvo"),
        effect=Effect.REFUSED,
        why="it has no place for their scales, and stops",
        ignore=tuple(f"*.self_attn.{name}_proj" for name in "qkvo"),
        source="SGLang 0.5.23 srt/models/olmo.py (OlmoAttention, load_weights)",
    ),
    WeightRule(
        model_types=("step3p5",),
        endings=(".self_attn.g_proj",),
        effect=Effect.MISREAD,
        why="it leaves their scales out without an error, and its answers are wrong",
        ignore=("*.self_attn.g_proj",),
        source="SGLang 0.5.23 srt/models/step3p5.py (g_proj, load_weights)",
    ),
)

_PARAMETER_RULES = ParameterRules(
    absent=Outcome(
        effect=Effect.MISREAD,
        what="the engine uses uninitialised memory, or ones for a norm",
        source="SGLang 0.5.23 srt/model_loader/loader.py (load_weights_and_postprocess compares "
        "nothing), read",
    ),
    misfit=Outcome(
        effect=Effect.UNKNOWN,
        what="loading most likely fails (AssertionError)",
        source="SGLang 0.5.23 srt/model_loader/weight_utils.py (default_weight_loader), "
        "srt/layers/vocab_parallel_embedding.py (weight_loader), read",
    ),
    narrows_experts=True,
    doubts_names=True,
    bare_types=("gpt2",),
    tied_types=("gemma", "gemma2", "gemma3_text", "gemma3n_text"),  # not read
)


_STORED_FUSED = WeightRule(
    has_blocks=True,
    effect=Effect.REFUSED,
    why="it cuts the scales of projections that are stored as one weight by rows, not by blocks "
    "(RuntimeError)",
    source="SGLang 0.5.8 srt/layers/linear.py (_load_fused_module_from_checkpoint), read",
)
_OLDER_RULES = (
    (3, replace(_STORED_FUSED, endings=(".qkv_proj",))),
    (9, replace(_STORED_FUSED, endings=(".gate_up_proj",))),
)
"""More rules, and the releases that ended them."""


def _list_weight_rules(release: Release) -> tuple[WeightRule, ...]:
    older = (rule for until, rule in _OLDER_RULES if release.number < until)
    return (*_WEIGHT_RULES, *older)


def _make_engine(release: Release) -> Engine:
    return Engine(
        key="sglang",
        minor_parts=3,
        title="SGLang",
        version=release.version,
        evidence=Evidence.LOADER,
        launch=Launch(
            command="python -m sglang.launch_server --model-path",
            kv_flag="--kv-cache-dtype fp8_e4m3",
            ranks_flag="--tp-size",
            scales_flag="--quantization-param-path",
        ),
        numerics=_NUMERICS,
        replay_folder=_make_replay(release),
        replay_json=_make_json_replay(release),
        tensor_file_condition="it is read only inside a model folder without "
        "model.safetensors.index.json whose config.json has the quantization_config of kv-overlay",
        splits_heads=True,
        make_linear_loader=_make_linear_loader_factory(release),
        weight_rules=_list_weight_rules(release),
        parameter_rules=replace(
            _PARAMETER_RULES, narrows_experts=release.number >= EXPERTS_NARROWED_SINCE
        ),
    )


_OLDER = tuple(
    replace(
        _make_engine(release),
        key=f"sglang=={release.version}",
        loads_like="sglang",
        numerics=_NUMERICS if release.number >= _NUMERICS_SINCE else None,
        no_numerics="the arithmetic of this release has not been read; --engine sglang is newer",
    )
    for release in RELEASES[1:]
)
SGLANG = replace(_make_engine(RELEASES[0]), is_default=True, releases=_OLDER)
