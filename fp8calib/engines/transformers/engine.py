"""The installed transformers, with the installed compressed-tensors."""

from __future__ import annotations

from importlib.metadata import version

from fp8calib.engines.engine import Engine, on_call
from fp8calib.engines.status import Evidence

TRANSFORMERS = Engine(
    key="transformers",
    title="transformers",
    version=version("transformers"),
    evidence=Evidence.RUN,
    no_numerics="with KV scales transformers keeps no FP8 cache: compressed-tensors rounds K and V "
    "to values of FP8 and stores them in the model's dtype (modeling/kvcache.py of 0.20). --engine "
    "reference rounds to the same format; its --kv-cache-dtype fp8_quantized_cache is that of "
    "QuantizedCache, whose other backends, quanto and hqq, are not emulated",
    replay_folder=on_call("fp8calib.engines.transformers.report:report_transformers"),
)
