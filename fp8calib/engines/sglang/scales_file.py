"""What SGLang does with `--quantization-param-path`."""

from __future__ import annotations

from pathlib import Path

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.scales_file import replay_scales_file
from fp8calib.engines.replay.verdicts import EngineReport, Refusal
from fp8calib.engines.sglang.model_types import find_sglang_type, takes_sglang_json
from fp8calib.engines.sglang.replay import has_kv_method
from fp8calib.engines.status import Status
from fp8calib.geometry.model_geometry import ModelGeometry

_EFFECT = (
    "SGLang parses the file; what the scales do depends on the attention backend (FlashAttention "
    "fails on them, Triton and FlashInfer use 1.0): kv-overlay is the more reliable form"
)


def replay_sglang_json(
    path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder, release: Release
) -> EngineReport:
    """Replay SGLang's loader on a JSON file, on `tp` ranks of a model.

    Raises:
        Refusal: SGLang does not start.
    """
    if not takes_sglang_json(geometry, release):
        owner = f"{release.title}'s {find_sglang_type(geometry)}"
        why = f"{owner} reads no file of scales: RuntimeError at start"
        raise Refusal(why, fix="serve a kv-overlay instead")
    report = replay_scales_file(path, geometry, tp)
    if any(layer.k.status is Status.DEFAULTED for layer in report.layers):
        return report
    if has_kv_method(model, geometry, release):
        why = "the model's quantization_config makes k_scale a parameter: setting it is a TypeError"
        raise Refusal(why, fix="store the scales in the checkpoint")
    return report.add_problems(_EFFECT)
