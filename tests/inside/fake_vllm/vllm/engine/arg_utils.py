"""Some of the arguments of vLLM."""

from dataclasses import dataclass


@dataclass
class EngineArgs:
    """Arguments with their defaults."""

    model: str = ""
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    load_format: str = "auto"
    speculative_config: object = None
