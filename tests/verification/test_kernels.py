"""The kernel of emulation, in Triton's interpreter, against torch's operations: bit for bit."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.hooks import HookedCache
from fp8calib.data.sequences import Batch
from fp8calib.model.topology.find import find_geometry
from fp8calib.numerics.formats import E4M3FN, E5M2, Fp8Format
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.damage import DamageSums, measure_damage
from fp8calib.verification.emulation.emulate import EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.fake_quantize import Quantizer
from scripts.benchmarks.launches import make_emulations
from tests import zoo
from tests.simulated_gpus import gpu

kernels: Any = pytest.importorskip(
    "fp8calib.verification.emulation.kernels", reason="Triton is in the extra `test`"
)
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ALL_CODES = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
SCALES = (torch.tensor([1.0]), torch.tensor([0.0371]), torch.tensor([3e-7]), Granularity.TOKEN)


def require_same(x: torch.Tensor, quantizer: Quantizer, *, flush_stride: int = 1) -> None:
    """Compare the values, and the damage where all of them are finite."""
    x = x.to(DEVICE)
    values, summed = kernels.fake_quantize(x, quantizer, flush_stride=flush_stride)
    fake = quantizer.fake(x)
    expected = fake.values.to(x.dtype)
    assert values.dtype is x.dtype
    assert torch.equal(values.isnan(), expected.isnan())
    both = [each.nan_to_num(0).cpu() for each in (values, expected)]
    assert torch.equal(both[0], both[1])
    assert torch.equal(both[0].signbit(), both[1].signbit())
    if not bool(expected.isfinite().all()):
        return
    sums = DamageSums[str]()
    sums.add("x", summed)
    sums.settle()
    row = measure_damage(
        x, fake, quantizer.fmt, saturates=quantizer.saturates, flush_stride=flush_stride
    )
    torch.testing.assert_close(sums.totals["x"], row, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("way", ["", "by_reciprocal", "in_model_dtype"])
def test_all_codes_of_16_bits_are_rounded_as_torch_does(
    dtype: torch.dtype, fmt: Fp8Format, scale: torch.Tensor | Granularity, way: str
) -> None:
    quantizer = Quantizer(fmt=fmt, scale=scale, **({way: True} if way else {}))
    if quantizer.fits_kernel:
        require_same(ALL_CODES.view(dtype).view(1, 1, 256, 256), quantizer)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 2),
        st.sampled_from([1, 3]),
        st.integers(1, 70),
        st.sampled_from([1, 64, 200, 700]),
    ),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    kind=st.sampled_from(["one", "heads", "token", "bounded"]),
    by_reciprocal=st.booleans(),
    scale_by_reciprocal=st.booleans(),
    saturates=st.booleans(),
    stride=st.sampled_from([1, 8]),
    is_transposed=st.booleans(),
)
def test_tensors_are_quantized_and_measured_as_torch_does(
    shape: tuple[int, int, int, int],
    seed: int,
    dtype: torch.dtype,
    kind: str,
    by_reciprocal: bool,
    scale_by_reciprocal: bool,
    saturates: bool,
    stride: int,
    is_transposed: bool,
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    batch, heads, tokens, size = shape
    x = torch.randn(batch, tokens, heads, size, generator=numbers)
    x *= torch.exp2(torch.randint(-12, 12, x.shape, generator=numbers).float())
    x[torch.rand(x.shape, generator=numbers) < 0.05] = 0
    x = x.to(dtype).transpose(1, 2)
    x = x if is_transposed else x.contiguous()
    static = torch.rand(heads, 1, 1, generator=numbers) + 0.01
    scale = {"one": static[0, 0], "heads": static}.get(kind, Granularity.TOKEN)
    quantizer = Quantizer(
        fmt=E4M3FN,
        scale=scale,
        by_reciprocal=by_reciprocal,
        scale_by_reciprocal=scale_by_reciprocal,
        saturates=saturates,
        largest_amax=1.0 if kind == "bounded" else None,
    ).to(torch.device(DEVICE))
    assert quantizer.fits_kernel
    require_same(x, quantizer, flush_stride=stride)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
def test_a_model_is_emulated_as_without_the_kernel() -> None:
    """K, V, q and inputs of a model whose V is a view: last hidden states, and the damage."""
    model = zoo.build("llama").to(torch.bfloat16)
    names = {name: name for name, _ in model.named_parameters()}
    geometry = find_geometry(model, names, checkpoint_dtype="bfloat16")[0]
    emulations = make_emulations(geometry)
    quantizers = emulations["w8a8 dynamic"] | emulations["kv"]
    batch = Batch(first=0, input_ids=torch.arange(24)[None], lengths=(24,))
    answers = []
    for has_kernels in (True, False):
        with gpu(has_kernels=has_kernels):
            decoder, hooks = Decoder(model.to("cuda:0")), EmulationHooks(quantizers)
            with open_emulation_hooks(model, geometry, hooks):
                hooks.begin_batch(batch)
                cache = HookedCache(decoder.config, geometry.owners(), (), hooks)
                hidden = decoder.run(batch, cache).cpu()
                hooks.end_batch()
            answers.append((hidden, {site: row.cpu() for site, row in hooks.damage.items()}))
            model.to("cpu")
    (found, damage), (expected, expected_damage) = answers
    assert torch.equal(found, expected)
    assert damage.keys() == expected_damage.keys() == quantizers.keys()
    for site, row in damage.items():
        torch.testing.assert_close(row, expected_damage[site], rtol=1e-6, atol=0)
