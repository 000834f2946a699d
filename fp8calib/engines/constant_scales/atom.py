"""AMD's ATOM, as of commit ffdf3bb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.status import Status
from fp8calib.engines.weights.weight_rule import WeightRule

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry

_PARSER = "ATOM ffdf3bb atom/quant_spec.py GenericParser"


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay `atom/model_ops/attention_mha.py` and `atom/model_loader/weight_names.py`.

    The cache is quantized per token and head, or by a constant that depends on the GPU. Names that
    no parameter has are logged and skipped.
    """
    from fp8calib.engines.constant_scales.replay import replay_constant  # noqa: PLC0415

    del tp
    why = "ATOM makes the scales of its FP8 cache itself, and skips those of the checkpoint"
    return replay_constant(folder, geometry, why=why, value=None)


_WEIGHT_RULES = (
    WeightRule(
        dialect="compressed-tensors",
        schemes=("fp8-static",),
        status=Status.USED,
        why="it leaves out the static input scales and quantizes inputs dynamically",
        source=f"{_PARSER}.parse (is_dynamic)",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        status=Status.USED,
        why="it quantizes the inputs too",
        source=f"{_PARSER}.parse (is_dynamic)",
    ),
    WeightRule(
        dialect="modelopt",
        status=Status.USED,
        why="it guesses the scheme from words in the config, which is not replayed",
        source=f"{_PARSER}._infer_qtype",
    ),
)

ATOM = Engine(
    key="atom",
    title="ATOM",
    version="ffdf3bb",
    is_brief=True,
    launch=Launch(
        command="python -m atom.entrypoints.openai_server --model",
        kv_flag="--kv-cache-dtype fp8",
        ranks_flag="--tensor-parallel-size",
    ),
    no_numerics="its arithmetic has not been read",
    replay_folder=_replay_folder,
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
)
