"""The installed transformers, with the installed compressed-tensors."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine
from fp8calib.engines.evidence import Evidence

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.model.shapes import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.transformers.report import report_transformers  # noqa: PLC0415

    return report_transformers(folder, geometry, tp)


TRANSFORMERS = Engine(
    key="transformers",
    title="transformers",
    version=version("transformers"),
    evidence=Evidence.RUN,
    no_numerics="with KV scales transformers keeps no FP8 cache: compressed-tensors rounds K and V "
    "to values of FP8 and stores them in the model's dtype (modeling/kvcache.py of 0.20). --engine "
    "reference rounds to the same format; its --kv-cache-dtype fp8_quantized_cache is that of "
    "QuantizedCache, whose other backends, quanto and hqq, are not emulated",
    replay_folder=_replay_folder,
)
