"""The class that vLLM adds to its workers: `--worker-extension-cls` names it."""

from __future__ import annotations

from fp8calib.plugins.vllm.live_scales import LiveScales
from fp8calib.plugins.vllm.observer import Observer


class FP8CalibWorker(Observer, LiveScales):
    """What fp8calib does inside a worker of vLLM; each method answers for its rank."""
