"""TGI (text-generation-inference), as of commit db931fc."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.status import Status
from fp8calib.engines.tgi.numerics import NUMERICS
from fp8calib.engines.weights.weight_rule import MX_UNREAD, NameRules, Opened, WeightRule

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.reader import LinearReader
    from fp8calib.geometry.model_geometry import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.tgi.replay import replay_tgi  # noqa: PLC0415

    return replay_tgi(folder, geometry, tp)


def _make_reader(folder: ScaleFolder, geometry: ModelGeometry) -> LinearReader:
    """Make a reader for experts that are loaded one by one."""
    from fp8calib.engines.weights.reader import make_plain_reader  # noqa: PLC0415

    del geometry
    return make_plain_reader(folder, joins_experts=False)


_WEIGHT_RULES = (
    MX_UNREAD,
    WeightRule(
        dialect="compressed-tensors",
        schemes=("fp8-block",),
        status=Status.REFUSED,
        why="it reads the scales of blocks as scales of rows, and stops",
        source="TGI layers/compressed_tensors/w8an_fp.py",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        status=Status.USED,
        why="it quantizes the inputs too, per token, where its kernels can",
        source="TGI layers/compressed_tensors/w8an_fp.py (force_w8a16)",
    ),
    WeightRule(
        dialect="modelopt",
        has_experts=True,
        status=Status.REFUSED,
        why="it loads FP8 experts of the methods fp8 and compressed-tensors alone (AssertionError)",
        source="TGI models/__init__.py (get_model), layers/moe/unquantized.py "
        "(_load_expert_multi_weights_col)",
    ),
    WeightRule(
        dialect="modelopt",
        status=Status.USED,
        why="it warns of the quant_method, and recognises FP8 weights by their dtype",
        source="TGI models/__init__.py (get_model), layers/fp8.py (HybridFP8UnquantLoader)",
    ),
)

TGI = Engine(
    key="tgi",
    title="TGI",
    version="db931fc",
    launch=Launch(
        command="text-generation-launcher --model-id",
        kv_flag="--kv-cache-dtype fp8_e4m3fn",
        ranks_flag="--num-shard",
    ),
    numerics=NUMERICS,
    replay_folder=_replay_folder,
    make_reader=_make_reader,
    tensor_file_condition="it is read only inside the model's folder",
    splits_heads=True,
    weight_rules=_WEIGHT_RULES,
    name_rules=NameRules(opened=Opened.ALL),
)
