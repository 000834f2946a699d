"""vLLM on Intel's Gaudi: the plugin vllm-gaudi, as of commit 091bbad, without INC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.engine import VLLM
from fp8calib.engines.weights.weight_rule import WeightRule

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.vllm.devices import replay_gaudi  # noqa: PLC0415

    return replay_gaudi(folder, geometry, tp)


_WEIGHT_RULES = (
    WeightRule(
        dialect="modelopt",
        schemes=("fp8-dynamic", "fp8-block"),
        status=Status.REFUSED,
        why="it loads ModelOpt's FP8 weights only with one scale per tensor (ValueError)",
        source="vllm-gaudi 091bbad vllm_gaudi/ops/hpu_modelopt.py HPUModelOptFp8Config",
    ),
    WeightRule(
        dialect="quark",
        status=Status.REFUSED,
        why="it has no such quant_method",
        source="vllm-gaudi 091bbad vllm_gaudi/platform.py supported_quantization",
    ),
)

VLLM_GAUDI = Engine(
    key="vllm-gaudi",
    title="vLLM on Gaudi",
    version="091bbad",
    is_brief=True,
    loads_like=VLLM.key,
    launch=Launch(
        command="vllm serve",
        kv_flag="--kv-cache-dtype fp8_inc",
        ranks_flag="--tensor-parallel-size",
    ),
    no_numerics="its arithmetic has not been read",
    replay_folder=_replay_folder,
    make_reader=VLLM.make_reader,
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
    name_rules=VLLM.name_rules,
)
