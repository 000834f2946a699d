"""vLLM loads our overlays and holds our numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.real_engines.exports import Exports, read_scale_tensors, read_scales
from tests.real_engines.vllm_job import VllmServer

FAMILIES = [
    ("llama-sharded", "fp8", 2),
    ("qwen3", "fp8", 2),
    ("phi3", "fp8", 2),
    ("opt", "fp8", 2),
    ("falcon", "auto", 2),
    ("gpt2", "fp8", 2),
    ("gptj", "fp8", 2),
    ("gpt_neox", "fp8", 2),
    ("gemma3", "auto", 2),
    ("gemma3n", "fp8", 4),
    ("mixtral", "fp8", 2),
    ("qwen3_moe", "fp8", 2),
    ("qwen3_next", "fp8", 1),
]


@pytest.mark.parametrize(("name", "kv_cache_dtype", "num_layers"), FAMILIES)
def test_every_layer_holds_the_scales_of_the_file_and_caches_fp8(
    exports: Exports, vllm: VllmServer, name: str, kv_cache_dtype: str, num_layers: int
) -> None:
    overlay = exports(name) / "kv-overlay"

    answer = vllm(overlay, kv_cache_dtype=kv_cache_dtype)

    assert answer.error == ""
    assert len(answer.layers) == num_layers
    assert answer.scales() == read_scales(overlay)
    assert answer.kernel_scales() == {
        layer: (k[0], v[0]) for layer, (k, v) in read_scales(overlay).items()
    }
    assert answer.cache_bytes() == {1}


def test_scales_of_one_element_in_one_dimension_turn_on_the_fp8_cache_by_themselves(
    exports: Exports, vllm: VllmServer
) -> None:
    overlay = exports("llama") / "kv-overlay"
    tensors = read_scale_tensors(overlay).values()
    assert {(tensor.dtype, tensor.shape) for tensor in tensors} == {(torch.float32, (1,))}

    answer = vllm(overlay, kv_cache_dtype="auto")

    assert answer.scales() == read_scales(overlay)
    assert {layer["kv_cache_dtype"] for layer in answer.layers.values()} == {"fp8"}
    assert answer.cache_bytes() == {1}


def test_a_scale_for_each_head_is_held_and_the_cpu_kernel_gets_the_largest(
    exports: Exports, vllm: VllmServer
) -> None:
    overlay = exports("llama", "kv-overlay-head") / "kv-overlay-head"
    expected = read_scales(overlay)
    assert {len(values) for pair in expected.values() for values in pair} == {2}

    answer = vllm(overlay, logprobs=[[5, 6, 7, 8]])

    assert answer.scales() == expected
    assert answer.kernel_scales() == {layer: (max(k), max(v)) for layer, (k, v) in expected.items()}
    assert len(answer.logprobs[0]) == 3


def test_a_model_that_the_cpu_build_cannot_run_at_all_is_named(
    exports: Exports, vllm: VllmServer
) -> None:
    answer = vllm(exports("gpt_oss") / "kv-overlay")

    if answer.error.startswith("NotImplementedError: No Unquantized MoE backend"):
        pytest.skip(f"gpt_oss on a CPU: {answer.error}")
    assert answer.scales() == read_scales(exports("gpt_oss") / "kv-overlay")
