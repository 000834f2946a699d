"""TensorRT-LLM's PyTorch backend, as of commit 008e0af, which Dynamo and NIM run too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.status import Status
from fp8calib.engines.weights.weight_rule import NameRules, Opened, WeightRule

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry

_CONFIG = "TensorRT-LLM 008e0af tensorrt_llm/_torch/model_config.py load_hf_quant_config"
_GROUPS = "TensorRT-LLM 21156a7 tensorrt_llm/models/quant_config_utils.py"
_LINEAR = "TensorRT-LLM 00bbf71 tensorrt_llm/_torch/modules/linear.py FP8BlockScalesLinearMethod"
_UNQUANTIZED = "it finds no algorithm in the config, and copies FP8 weights without their scales"


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay `_torch/modules/attention.py`: only an NVFP4 cache gets the scales of a checkpoint.

    `_torch/attention_backend/trtllm.py` gives an FP8 cache ones.
    """
    from fp8calib.engines.constant_scales.replay import (  # noqa: PLC0415
        refuse_tensorrt_llm,
        replay_constant,
    )

    del tp
    refuse_tensorrt_llm(folder)
    why = "TensorRT-LLM uses KV scales for an NVFP4 cache alone; for FP8, 1.0"
    return replay_constant(folder, geometry, why=why, value=1.0)


_WEIGHT_RULES = (
    WeightRule(
        dialect="compressed-tensors",
        schemes=("fp8-static", "w8a16"),
        status=Status.REFUSED,
        why="of compressed-tensors it reads weights per channel with inputs per token, and blocks "
        "of 128, alone",
        source=f"{_GROUPS} _quant_config_from_config_group",
    ),
    WeightRule(
        dialect="autofp8",
        schemes=("fp8-static",),
        status=Status.USED,
        why="it repeats the scale of a weight for every block, and quantizes inputs per group of "
        "128; on several ranks a scale of shape [] is an IndexError",
        source=f"{_CONFIG}; {_LINEAR}",
    ),
    WeightRule(
        dialect="autofp8",
        schemes=("fp8-dynamic",),
        status=Status.MISREAD,
        why=_UNQUANTIZED,
        source=_CONFIG,
    ),
    WeightRule(dialect="quark", status=Status.MISREAD, why=_UNQUANTIZED, source=_CONFIG),
)


TENSORRT_LLM = Engine(
    key="tensorrt-llm",
    title="TensorRT-LLM",
    version="008e0af",
    is_brief=True,
    launch=Launch(command="trtllm-serve", kv_flag="--kv_cache_dtype fp8", ranks_flag="--tp_size"),
    no_numerics="its arithmetic has not been read",
    replay_folder=_replay_folder,
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
    name_rules=NameRules(opened=Opened.ALL),
)
