"""vLLM on Google's TPUs: the plugin tpu-inference, as of commit b8692ff."""

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

_FOLDER = "tpu-inference b8692ff tpu_inference/layers/vllm/quantization"


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.vllm.devices import replay_tpu  # noqa: PLC0415

    return replay_tpu(folder, geometry, tp)


_WEIGHT_RULES = (
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        status=Status.REFUSED,
        why="it has no scheme for weights alone (NotImplementedError)",
        source=f"{_FOLDER}/compressed_tensors/compressed_tensors.py get_scheme",
    ),
    WeightRule(
        dialect="autofp8",
        schemes=("fp8-static", "fp8-dynamic"),
        has_experts=True,
        status=Status.REFUSED,
        why="it loads FP8 experts of this method in blocks alone (NotImplementedError)",
        source=f"{_FOLDER}/fp8.py VllmFp8MoEMethod",
    ),
    *(
        WeightRule(
            dialect=dialect,
            status=Status.REFUSED,
            why="it has no such quant_method (NotImplementedError)",
            source=f"{_FOLDER}/__init__.py get_tpu_quantization_config",
        )
        for dialect in ("modelopt", "quark")
    ),
)

VLLM_TPU = Engine(
    key="vllm-tpu",
    title="vLLM on TPU",
    version="b8692ff",
    is_brief=True,
    loads_like=VLLM.key,
    launch=Launch(
        command="MODEL_IMPL_TYPE=vllm vllm serve",
        kv_flag="--kv-cache-dtype fp8",
        ranks_flag="--tensor-parallel-size",
    ),
    no_numerics="its arithmetic has not been read",
    replay_folder=_replay_folder,
    make_reader=VLLM.make_reader,
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
    name_rules=VLLM.name_rules,
)
