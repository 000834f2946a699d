"""vLLM on a GPU, and on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from fp8calib.engines.arithmetic import Numerics, read_numerics
from fp8calib.engines.engine import Engine, Launch, Storage, call
from fp8calib.engines.facts.release import (
    ADDED_ROOTS,
    BFLOAT16_TYPES,
    QUERY_GPUS,
    VLLM_RELEASES,
    VLLM_RUN,
    Release,
    explain_type,
)
from fp8calib.engines.weights.rules import NameRules, read_weight_rules

_HERE = "fp8calib.engines.vllm"
_KERNELS_RUN = "GPU kernels that Numerics names were run on an H100"
_RUN_ON_GPUS = frozenset(
    {
        *("quantizes_query", "query_by_reciprocal", "probability_factor", "probability_tiles"),
        *("prompt_reads_cache", "input_by_reciprocal", "token_by_reciprocal"),
        *("token_scale_by_reciprocal", "smallest_dynamic_scale", "smallest_group_scale"),
    }
)
_KERNELS_READ = "kernels and functions that Numerics names are those of 0.32.0"
_REPEATS_SCALES = "the scales of experts are repeated for smaller blocks"


def _read_storage(release: Release) -> Storage:
    """Read which backend stores which type of the KV cache on which GPUs."""
    orders = [each.split(": ") for each in release.list_values("order of the backends on")]
    ranks = {
        (generation, backend): rank
        for order, generations in orders
        for generation in generations.split(", ")
        for rank, backend in enumerate(order.split(", "))
    }
    found: dict[tuple[str, str], list[tuple[int, str, Collection[int]]]] = defaultdict(list)
    for value in release.list_values("backend stores a cache type on"):
        backend, cache_type, places = value.split(": ")
        for part in places.split("; "):
            generations, _, sizes = part.partition(" but heads of ")
            refused = tuple(map(int, sizes.split()))
            for generation in generations.split(", "):
                found[cache_type, generation].append((ranks[generation, backend], backend, refused))
    return found


def _make_numerics(release: Release) -> Numerics:
    """Give the arithmetic of a release: that of 0.32.0, which was read, and what differs.

    Of older ones only Python was compared with it, and kernels where they ran on a GPU.
    """
    known = read_numerics("vllm")
    query = known.sources["quantizes_query"] + ", and ".join(release.list_values(QUERY_GPUS))
    run = known.run if release.has(_KERNELS_READ) else frozenset()
    return replace(
        known,
        bfloat16_types=release.list_values(BFLOAT16_TYPES),
        sources={**known.sources, "quantizes_query": query},
        run=run | (_RUN_ON_GPUS if release.has(_KERNELS_RUN) else frozenset()),
    )


_HEADLESS = "class of this model type has no output layer"
_REFUSED_TIES = "class of this model type stops at a tied output layer"
_UNTIES = "stored lm_head.weight is loaded, though config.json ties it"


def _make_engine(release: Release) -> Engine:
    return Engine(
        key="vllm",
        loader="vllm",
        minor_parts=2,
        title="vLLM",
        version=release.version,
        evidence=release.evidence,
        launch=Launch(
            command="vllm serve",
            kv_flag="--kv-cache-dtype fp8",
            ranks_flag="--tensor-parallel-size",
        ),
        numerics=_make_numerics(release),
        cache_types=release.list_values("--kv-cache-dtype"),
        storage=_read_storage(release),
        multiplied={
            name: frozenset(generations.split(", "))
            for value in release.list_values("GPU multiplies quantized inputs in")
            for name, generations in [value.split(": ")]
        },
        view=partial(call, f"{_HERE}.files:open_as_vllm"),
        replay_folder=partial(call, f"{_HERE}.replay:replay_vllm", release),
        no_json="vLLM reads no JSON of scales since 0.7 (--quantization-param-path is gone)",
        explain_type=partial(explain_type, release),
        splits_heads=True,
        make_reader=partial(call, f"{_HERE}.linears:VllmReader.open", release),
        weight_rules=read_weight_rules(release, "vllm"),
        repeats_expert_scales=release.has(_REPEATS_SCALES),
        name_rules=NameRules(
            is_silent_if_quantized=True,
            bare_types=tuple(each.partition(": ")[0] for each in release.list_values(ADDED_ROOTS)),
            skipped_experts=("glm4_moe", "qwen3_moe"),
            headless_types=release.list_values(_HEADLESS),
            untied_types=release.list_values(_REFUSED_TIES),
            unties_stored=release.has(_UNTIES),
            tied_types=("Gemma3ForConditionalGeneration",),  # its text_config decides, not run
        ),
    )


_NEWEST_FIRST = tuple(map(_make_engine, reversed(VLLM_RELEASES)))
VLLM = replace(
    _NEWEST_FIRST[0],
    is_default=True,
    releases=tuple(
        replace(engine, key=f"vllm=={release.name}")
        for engine, release in zip(_NEWEST_FIRST, reversed(VLLM_RELEASES), strict=True)
        if engine is not _NEWEST_FIRST[0]
    ),
)
VLLM_CPU = replace(
    next(each for each in _NEWEST_FIRST if each.version == VLLM_RUN.version),
    key="vllm-cpu",
    launch=None,
    numerics=replace(
        read_numerics("vllm-cpu"), bfloat16_types=VLLM_RUN.list_values(BFLOAT16_TYPES)
    ),
    cache_types=("fp8", "fp8_e4m3", "fp8_e5m2"),
    storage={},
    multiplied={},
    replay_folder=partial(call, f"{_HERE}.replay:replay_cpu"),
)
"""vLLM 0.32.0 on a CPU, the newest release of vllm-cpu: vLLM's loader with other kernels.

The KV cache is rounded toward zero, and the largest of a layer's per-head scales serves all heads.
It stores FP8 alone: v1/attention/backends/cpu_attn.py CPUAttentionBackend.
"""
