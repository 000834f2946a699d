"""The class that a user names: `vllm serve ... --worker-extension-cls`."""

from __future__ import annotations

from fp8calib.inside.live_scales import LiveScales


class FP8CalibWorker(LiveScales):
    """What fp8calib asks the workers of a running vLLM."""
