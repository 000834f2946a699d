"""vLLM 0.4 to 0.6, the last releases that read a JSON file of scales."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.geometry.model_geometry import ModelGeometry


def _replay_json(path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder) -> EngineReport:
    """Replay `kv_cache_scales_loader` (`quantization/schema.py`, `weight_utils.py`).

    The example of vLLM 0.4 (`examples/fp8/README.md`) promises scales for Llama 2 alone.
    """
    from fp8calib.engines.replay.scales_file import replay_scales_file  # noqa: PLC0415

    del model
    report = replay_scales_file(path, geometry, tp)
    if geometry.model_type == "llama" or not report.ok:
        return report
    return report.add_problems("its documentation promises the scales file for Llama 2 only")


VLLM_BEFORE_0_7 = Engine(
    key="vllm-0.6",
    title="vLLM 0.4-0.6",
    version="0.4 to 0.6",
    launch=Launch(
        command="python -m vllm.entrypoints.openai.api_server --model",
        kv_flag="--kv-cache-dtype fp8",
        ranks_flag="--tensor-parallel-size",
        scales_flag="--quantization-param-path",
    ),
    no_numerics="the arithmetic of these releases has not been read; --engine vllm is newer",
    replay_json=_replay_json,
    no_folder="only its reading of a JSON file of scales is replayed; --engine vllm is newer",
    splits_heads=True,
)
