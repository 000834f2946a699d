from dataclasses import dataclass


@dataclass
class EngineArgs:
    model: str = ""
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    load_format: str = "auto"
