"""transformers 5.23 with compressed-tensors 0.20."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Evidence
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
    from fp8calib.engines.transformers.replay import replay_transformers  # noqa: PLC0415

    return replay_transformers(folder, geometry, tp)


def _make_linear_loader(folder: ScaleFolder, geometry: ModelGeometry) -> LinearLoader:
    from fp8calib.engines.transformers.linear_loader import make_linear_loader  # noqa: PLC0415

    return make_linear_loader(folder, geometry.checkpoint_dtype)


_WEIGHT_RULES = (
    WeightRule(
        dialect="autofp8",
        schemes=("fp8-static", "fp8-dynamic"),
        effect=Effect.REFUSED,
        why="it looks for scales named weight_scale_inv and activation_scale: without a GPU the "
        "first forward pass fails (RuntimeError), with one it uses 1.0",
        fix="rename the scales: the numbers are the same",
        source="transformers 5.23 integrations/finegrained_fp8.py, run on a CPU, read for a GPU",
    ),
    WeightRule(
        dialect="modelopt",
        effect=Effect.MISREAD,
        why="it leaves the scales out without an error, and its answers are wrong",
        source="transformers 5.23, tried",
    ),
    WeightRule(
        dialect="compressed-tensors",
        effect=Effect.CONDITION,
        why="the package compressed-tensors has to be installed",
        source="transformers 5.23 quantizers/quantizer_compressed_tensors.py",
    ),
)

_PARAMETER_RULES = ParameterRules(
    absent=Outcome(
        effect=Effect.MISREAD,
        what="transformers reports it MISSING, and uses random numbers, or ones for a norm",
        source="transformers 5.23 modeling_utils.py (from_pretrained), run",
    ),
    misfit=Outcome(
        effect=Effect.REFUSED,
        what="loading fails (RuntimeError: size mismatch)",
        source="transformers 5.23 modeling_utils.py (from_pretrained), run",
    ),
    opened=Opened.SINGLE,
)

TRANSFORMERS = Engine(
    key="transformers",
    title="transformers",
    version="5.23",
    evidence=Evidence.RUN,
    is_default=True,
    no_numerics="transformers keeps no FP8 cache: compressed-tensors rounds K and V to values of "
    "FP8 and stores them in the model's dtype (modeling/kvcache.py of 0.20); --engine reference "
    "rounds to the same format",
    replay_folder=_replay_folder,
    make_linear_loader=_make_linear_loader,
    weight_rules=_WEIGHT_RULES,
    parameter_rules=_PARAMETER_RULES,
)
