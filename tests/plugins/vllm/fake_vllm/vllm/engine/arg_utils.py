"""Some of the arguments of vLLM."""

from dataclasses import dataclass


@dataclass
class EngineArgs:
    """Arguments with their defaults."""

    model: str = ""
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    limit_mm_per_prompt: object = None
    load_format: str = "auto"
    speculative_config: object = None
