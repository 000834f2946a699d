"""LMDeploy 0.16.0 with its PyTorch backend, as of commit 1263d5c."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.status import Status
from fp8calib.engines.weights.weight_rule import NameRules, Opened, WeightRule

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry

_CONFIG = "LMDeploy 1263d5c lmdeploy/pytorch/config.py QuantizationConfig.from_config"
_LINEAR = "LMDeploy 1263d5c lmdeploy/pytorch/nn/linear/__init__.py build_linear"


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay `lmdeploy/pytorch/nn/attention.py`, whose scales are buffers of ones.

    `load_weights` of its models looks up every name of the files among the parameters.
    """
    from fp8calib.engines.constant_scales.replay import (  # noqa: PLC0415
        refuse_lmdeploy,
        replay_constant,
    )

    del tp
    refuse_lmdeploy(folder, geometry)
    return replay_constant(folder, geometry, why="LMDeploy's FP8 cache uses 1.0", value=1.0)


_WEIGHT_RULES = (
    *(
        WeightRule(
            dialect=dialect,
            status=Status.REFUSED,
            why="of FP8 checkpoints it loads quant_method fp8 alone (TypeError)",
            source=_CONFIG,
        )
        for dialect in ("compressed-tensors", "modelopt", "quark")
    ),
    WeightRule(
        dialect="autofp8",
        schemes=("fp8-dynamic",),
        status=Status.REFUSED,
        why="it takes dynamic inputs for weights in blocks, and finds no weight_scale (KeyError)",
        source=_LINEAR,
    ),
    WeightRule(
        dialect="finegrained",
        status=Status.REFUSED,
        why="it looks for per-tensor scales named weight_scale and input_scale (KeyError)",
        fix="rename the scales: the numbers are the same",
        source=_LINEAR,
    ),
)


LMDEPLOY = Engine(
    key="lmdeploy",
    title="LMDeploy",
    version="0.16.0",
    is_brief=True,
    launch=Launch(
        command="lmdeploy serve api_server --backend pytorch",
        kv_flag="--quant-policy fp8",
        ranks_flag="--tp",
    ),
    no_numerics="its arithmetic has not been read",
    replay_folder=_replay_folder,
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
    name_rules=NameRules(opened=Opened.SINGLE),
)
