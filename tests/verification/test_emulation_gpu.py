"""Candidate on a GPU, or on a simulated one, beside the CPU's."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.damage import (
    DamageSums,
    measure_damage,
    sum_damage,
)
from fp8calib.verification.emulation.fake_quantize import Quantizer
from tests.simulated_gpus import simulated_gpus

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
STATIC = torch.tensor(0.0371)


def gpu() -> AbstractContextManager[None]:
    return nullcontext() if torch.cuda.is_available() else simulated_gpus(1)


@pytest.mark.parametrize("stride", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("scale", [STATIC, Granularity.TOKEN])
def test_damage_on_a_gpu_is_that_on_a_cpu(
    stride: int, dtype: torch.dtype, saturates: bool, scale: torch.Tensor | Granularity
) -> None:
    """Of two tensors, one of them under two keys and twice; values clip and vanish."""
    quantizer = Quantizer(fmt=E4M3FN, scale=scale, by_reciprocal=True)
    generator = torch.Generator().manual_seed(3)
    tensors = [
        (torch.randn(n, 50, generator=generator) * torch.logspace(-9, 6, 50)).to(dtype)
        for n in (40, 24)
    ]
    settings: Any = {"saturates": saturates, "flush_stride": stride}
    rows = [measure_damage(x, quantizer.fake(x), E4M3FN, **settings) for x in tensors]
    expected = {"a": sum_damage([rows[0]] * 2), "b": sum_damage(rows), "c": rows[1]}
    with gpu():
        sums = DamageSums[str]()
        for _ in range(2):
            on_gpu = [x.cuda() for x in tensors]
            placed = quantizer.to(on_gpu[0].device)
            fakes = [placed.fake(x) for x in on_gpu]
            for x, fake in zip(tensors, fakes, strict=True):
                assert torch.equal(fake.values.cpu(), quantizer.fake(x).values)
            first, second = (
                measure_damage(x, fake, E4M3FN, **settings)
                for x, fake in zip(on_gpu, fakes, strict=True)
            )
            sums.add("a", first)
            sums.add("a", first)
            sums.add("b", first)
            sums.add("b", second)
            sums.add("c", second)
            sums.settle()
        found = {key: total.cpu() for key, total in sums.totals.items()}
    for key, total in expected.items():
        doubled = torch.cat([2 * total[:-1], total[-1:]])
        torch.testing.assert_close(found[key], doubled, rtol=1e-6, atol=0)
    assert (expected["a"][2] > 0) == isinstance(scale, torch.Tensor)
