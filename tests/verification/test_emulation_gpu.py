"""Candidate on a GPU, or on a simulated one, beside the CPU's."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from fp8calib.model.shapes import Role
from fp8calib.model.topology.find import find_geometry
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.damage import (
    DamageSums,
    measure_damage,
    sum_damage,
)
from fp8calib.verification.emulation.emulate import EmulationHooks
from fp8calib.verification.emulation.fake_quantize import Quantizer
from tests import zoo
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


def test_k_and_v_are_quantized_together_on_a_gpu() -> None:
    """One pair has scales of its own each; of another pair the shapes differ."""
    model = zoo.build("llama")
    names = {name: name for name, _ in model.named_parameters()}
    geometry = find_geometry(model, names, checkpoint_dtype="float32")[0]
    attention = next(a for _, a in geometry.attentions())
    sites = attention.site(Role.K), attention.site(Role.V)
    scales = (STATIC, torch.tensor(1.7))
    quantizers = {
        site: Quantizer(fmt=E4M3FN, scale=scale) for site, scale in zip(sites, scales, strict=True)
    }
    for shapes in (((1, 2, 5, 8), (1, 2, 5, 8)), ((1, 2, 5, 8), (1, 2, 5, 4))):
        tensors = [torch.randn(*shape) * 30 for shape in shapes]
        on_cpu = EmulationHooks(quantizers)
        expected = on_cpu.on_kv(attention, *tensors)
        on_cpu.end_batch()
        with gpu():
            hooks = EmulationHooks(quantizers)
            found = [x.cpu() for x in hooks.on_kv(attention, *(x.cuda() for x in tensors))]
            hooks.end_batch()
            damage = {site: total.cpu() for site, total in hooks.damage.items()}
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        for site in sites:
            torch.testing.assert_close(damage[site], on_cpu.damage[site], rtol=1e-6, atol=0)
