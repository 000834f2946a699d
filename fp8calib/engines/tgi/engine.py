"""TGI (text-generation-inference), as of commit db931fc."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.tgi.numerics import NUMERICS
from fp8calib.engines.weights.weight_rule import (
    Effect,
    Opened,
    Outcome,
    ParameterRules,
    WeightRule,
)

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.linear_loader import LinearLoader
    from fp8calib.geometry.model_geometry import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.tgi.replay import replay_tgi  # noqa: PLC0415

    return replay_tgi(folder, geometry, tp)


def _make_linear_loader(folder: ScaleFolder, geometry: ModelGeometry) -> LinearLoader:
    from fp8calib.engines.tgi.linear_loader import TgiLinearLoader  # noqa: PLC0415

    del geometry
    return TgiLinearLoader(folder)


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
        has_experts=True,
        effect=Effect.REFUSED,
        why="it loads FP8 experts of the methods fp8 and compressed-tensors alone (AssertionError)",
        source="TGI models/__init__.py (get_model), layers/moe/unquantized.py "
        "(_load_expert_multi_weights_col)",
    ),
    WeightRule(
        dialect="modelopt",
        effect=Effect.CONDITION,
        why="it warns of the quant_method, and recognises FP8 weights by their dtype",
        source="TGI models/__init__.py (get_model), layers/fp8.py (HybridFP8UnquantLoader)",
    ),
)

_PARAMETER_RULES = ParameterRules(
    absent=Outcome(
        effect=Effect.REFUSED,
        what="loading fails (RuntimeError: does not exist)",
        source="TGI db931fc utils/weights.py (get_filename), read",
    ),
    misfit=Outcome(
        effect=Effect.REFUSED,
        what="TGI takes it as it is stored, and the first forward pass fails (RuntimeError)",
        source="TGI db931fc utils/weights.py (get_sharded), "
        "models/custom_modeling/ (qkv.split), read",
    ),
    takes_rows=True,
    opened=Opened.ALL,
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
    numerics=NUMERICS,
    replay_folder=_replay_folder,
    make_linear_loader=_make_linear_loader,
    tensor_file_condition="it is read only inside the model's folder",
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
    parameter_rules=_PARAMETER_RULES,
)
