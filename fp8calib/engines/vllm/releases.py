"""The releases of vLLM whose rules are known, and what differs between them.

0.32.0 was run on a CPU, and read. 0.33.0 was read in its wheel (commit 4ba787ec9): the functions
that the rules cite were compared with those of 0.32.0. What `Release` does not name is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8calib.engines.engine import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release; the fields are what differs."""

    version: str
    evidence: Evidence
    """How its loading rules are known."""
    own_file_algorithms: tuple[str, ...]
    """ModelOpt's algorithms that are accepted where `hf_quant_config.json`, which is nested, is the
    only config (`transformers_utils/model_arch_config_convertor.py`)."""
    reads_exclude_modules: bool
    """Whether `exclude_modules` in config.json excludes linears where there is no `ignore`, which
    is all that 0.32 reads there (`model_executor/layers/quantization/modelopt.py` from_config)."""
    query_gpus: str
    """Where the Triton backend quantizes q (`v1/attention/backends/triton_attn.py`)."""
    unscaled_cache_types: tuple[str, ...]
    """Values of `--kv-cache-dtype` whose scales are no file's (`config/cache.py`)."""
    has_cache_type_registry: bool
    """Whether platforms register values of their own there (`register_kv_cache_dtype`)."""
    runs_on_gpus: bool = True
    """False on other devices, where conditions of GPUs and their backends do not apply."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"vLLM {self.version.removesuffix('.0')}"


_OWN_FILE_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
_UNSCALED_CACHE_TYPES = ("*_per_token_head", "turboquant_*", "ultraquant_4bit")

VLLM_0_33 = Release(
    version="0.33.0",
    evidence=Evidence.READ,
    own_file_algorithms=(*_OWN_FILE_ALGORITHMS, "MIXED_PRECISION"),
    reads_exclude_modules=True,
    query_gpus="CUDA, and AMD GPUs except gfx90a and gfx11",
    unscaled_cache_types=(*_UNSCALED_CACHE_TYPES, "octave_*"),
    has_cache_type_registry=True,
)
VLLM_0_32 = Release(
    version="0.32.0",
    evidence=Evidence.RUN,
    own_file_algorithms=_OWN_FILE_ALGORITHMS,
    reads_exclude_modules=False,
    query_gpus="CUDA",
    unscaled_cache_types=_UNSCALED_CACHE_TYPES,
    has_cache_type_registry=False,
)
