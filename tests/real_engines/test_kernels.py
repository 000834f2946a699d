"""Emulated cache types against the kernels of vLLM and SGLang, run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import pytest
import torch

from fp8calib.engines.facts.release import SGLANG_RELEASES
from fp8calib.kv_types import fp4, per_token_head, turboquant
from fp8calib.kv_types.cache_types import CACHE_TYPES
from fp8calib.kv_types.rotations import hadamard
from tests.kv_types.test_round_trips import draw_vectors
from tests.real_engines.package import open_release
from tests.real_engines.vllm_job import ENVIRONMENT, PYTHON, ROOT

Pair = tuple[torch.Tensor, torch.Tensor]
SHAPES = {
    "64, bfloat16": (64, torch.bfloat16),
    "64, float32": (64, torch.float32),
    "96, bfloat16": (96, torch.bfloat16),
    "128, float16": (128, torch.float16),
}
TWO_HALF_STEPS = 2.0**-10
"""Lengths are kept in fp16, and the kernel that dequantizes for a further prompt writes fp16."""


def draw_pairs() -> dict[str, Pair]:
    """Draw K and V [tokens, heads, size]."""
    return {
        name: tuple(
            draw_vectors(size, dtype, seed=seed).flatten(0, 1).transpose(0, 1).contiguous()
            for seed in (1, 2)
        )
        for name, (size, dtype) in SHAPES.items()
    }  # type: ignore[return-value]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    """Let the kernels of every type store them, and read them back."""
    folder = tmp_path_factory.mktemp("kernels")
    torch.save(draw_pairs(), folder / "in.pt")
    job = ROOT / "tests" / "real_engines" / "kernel_job.py"
    for file in ("mxfp8_quant_store_kv.py", "kvfp4_tensor.py"):
        text = open_release(SGLANG_RELEASES[-1]).read(file)
        (folder / file).write_text(text)
    command = [PYTHON, job, folder / "in.pt", folder / "out.pt", folder]
    environment = {**os.environ, **ENVIRONMENT, "TRITON_INTERPRET": "1"}
    subprocess.run(command, env=environment, check=True, timeout=1200)
    found: Mapping[str, Pair] = torch.load(folder / "out.pt")
    return found


NAMES = [name for name, each in CACHE_TYPES.items() if each.is_kernel_run]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_kernel(stored: Mapping[str, Pair], name: str, shape: str) -> None:
    if f"{shape}/{name}" not in stored:
        pytest.skip("the kernel takes no such heads or dtype")
    key, value = draw_pairs()[shape]
    found_key, found_value = stored[f"{shape}/{name}"]
    cache_type = CACHE_TYPES[name]
    if name.startswith("int4"):
        assert torch.equal(per_token_head.int4_as_rotated(key), found_key)
        assert torch.equal(per_token_head.int4_as_rotated(value), found_value)
    elif name.startswith("turboquant"):
        is_plain = cache_type.key is turboquant.fp8_key
        mine = cache_type.key(key) if is_plain else hadamard(cache_type.key(key))
        assert_near(mine, found_key)
        assert_near(cache_type.value(value), found_value)
    elif name == "ultraquant_4bit":
        assert torch.equal(fp4.ultraquant(value), found_value)
        assert_near(hadamard(cache_type.key(key)), found_key)
    else:
        assert torch.equal(cache_type.key(key), found_key)
        assert torch.equal(cache_type.value(value), found_value)


def assert_near(mine: torch.Tensor, found: torch.Tensor) -> None:
    """Compare within the rounding to fp16 of values as large as the largest of their vector.

    A product in another order may fall on the other side of a step: one in a thousand does.
    """
    largest = mine.abs().amax(-1, keepdim=True)
    is_near = (mine - found).abs() <= TWO_HALF_STEPS * largest + 1e-7
    assert float(is_near.float().mean()) >= 0.999


def test_interpreter_was_used(stored: Mapping[str, Pair]) -> None:
    assert {key.rpartition("/")[2] for key in stored} >= set(NAMES)
