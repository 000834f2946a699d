"""TGI (text-generation-inference), as of commit db931fc."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Effect, Engine, Launch, WeightRule
from fp8calib.engines.numerics import SMALLEST_TOKEN_SCALE, Numerics

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.tgi.replay import replay_tgi  # noqa: PLC0415

    return replay_tgi(folder, geometry, tp)


_CACHE = "TGI 065f87a server/text_generation_server/layers/attention/kv_cache.py"
_FP8 = "TGI 05d0aa6 server/text_generation_server/layers/fp8.py"
_MARLIN = "danieldk/marlin-kernels 0e1f9d6 csrc/quantization/fp8/common.cu"
_NUMERICS = Numerics(
    name="tgi",
    kv_by_reciprocal=True,
    kv_saturates_unscaled=False,
    kv_scales_e5m2=False,
    kv_per_head=False,
    kv_joint_in_model_dtype=True,
    static_inputs_ignored=True,
    smallest_dynamic_scale=SMALLEST_TOKEN_SCALE,
    sources={
        "kv_by_reciprocal": f"{_CACHE} KVCache.store; {_MARLIN} scaled_fp8_quant_kernel",
        "kv_saturates_unscaled": f"{_CACHE} KVCache.store: scales of 1.0 leave the "
        "cast to torch (2.4 to 2.7, whose e4m3fn overflows to NaN)",
        "kv_scales_e5m2": f"{_CACHE} KVCache.can_scale",
        "kv_per_head": f"{_CACHE} KVScales.__post_init__",
        "kv_joint_in_model_dtype": f"{_CACHE} get_kv_scales: get_tensor casts",
        "static_inputs_ignored": f"{_FP8} Fp8Linear.forward, wherever cutlass has FP8 "
        "(Hopper; older GPUs leave inputs alone)",
        "smallest_dynamic_scale": f"{_MARLIN} dynamic_per_token_scaled_fp8_quant_kernel",
    },
)

_WEIGHT_RULES = (
    WeightRule(
        dialect="compressed-tensors",
        schemes=("fp8-block",),
        effect=Effect.REFUSED,
        why="it reads the scales of blocks as scales of rows, and stops",
        source="TGI layers/compressed_tensors/w8an_fp.py",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        effect=Effect.CONDITION,
        why="it quantizes the inputs too, per token, where its kernels can",
        source="TGI layers/compressed_tensors/w8an_fp.py (force_w8a16)",
    ),
    WeightRule(
        dialect="modelopt",
        effect=Effect.CONDITION,
        why="it warns of the quant_method, and recognises FP8 weights by their dtype",
        source="TGI models/__init__.py (get_model), layers/fp8.py (HybridFP8UnquantLoader)",
    ),
)

TGI = Engine(
    key="tgi",
    title="TGI",
    version="db931fc",
    is_default=True,
    launch=Launch(
        command="text-generation-launcher --model-id",
        kv_flag="--kv-cache-dtype fp8_e4m3fn",
        ranks_flag="--num-shard",
    ),
    numerics=_NUMERICS,
    replay_folder=_replay_folder,
    tensor_file_condition="it is read only inside the model's folder",
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
)
