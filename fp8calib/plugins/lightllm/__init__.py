"""LightLLM: its file of KV scales as a format, and its loader as an engine of `check`."""

from fp8calib.plugin import Plugin

PLUGIN = Plugin(
    formats=(
        "fp8calib.plugins.lightllm.format:LIGHTLLM",
        "fp8calib.plugins.lightllm.format:LIGHTLLM_HEAD",
    ),
    engines=("fp8calib.plugins.lightllm.engine:LIGHTLLM_ENGINE",),
)
