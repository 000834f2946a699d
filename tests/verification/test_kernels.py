"""The kernel of emulation, in Triton's interpreter, against torch's operations: bit for bit."""

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.hooks import HookedCache
from fp8calib.calibration.kernel_trial import agree
from fp8calib.data.sequences import Batch
from fp8calib.model.topology import find_geometry
from fp8calib.numerics.amax import tokens_first
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.numerics.schemes import BLOCK, MX_BLOCK, Granularity
from fp8calib.verification.emulation import probabilities
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.fake_quantize import (
    FakeQuantized,
    Quantizer,
    add_damage,
    measure_damage,
)
from scripts.benchmarks.launches import make_emulations
from tests import zoo
from tests.kit.minutes import in_minutes, takes_minutes
from tests.simulated_gpus import gpu

kernels: Any = pytest.importorskip(
    "fp8calib.verification.emulation.kernels", reason="Triton is in the extra `test`"
)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ALL_CODES = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
SCALES: dict[str, dict[str, Any]] = {
    "1": {"scale": torch.tensor([1.0])},
    "0.0371": {"scale": torch.tensor([0.0371])},
    "3e-7": {"scale": torch.tensor([3e-7])},
    "token": {"scale": Granularity.TOKEN},
    "token, power of two": {"scale": Granularity.TOKEN, "power_of_two": True},
    "tensor, power of two": {"scale": Granularity.TENSOR, "power_of_two": True},
    "group": {"scale": Granularity.GROUP},
    "group, power of two": {"scale": Granularity.GROUP, "power_of_two": True},
    "mx": {"scale": Granularity.GROUP, "block": MX_BLOCK, "power_of_two": True},
}


def require_same(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    flush_stride: int = 1,
    mask: torch.Tensor | None = None,
) -> None:
    """Compare the values, and the damage where all of them are finite."""
    x, counted = x.to(DEVICE), None
    if mask is not None:
        kept = mask.flatten().nonzero().squeeze(1).to(DEVICE)
        numbers = torch.full((mask.numel(),), -1, dtype=torch.int32, device=DEVICE)
        numbers[kept] = torch.arange(len(kept), dtype=torch.int32, device=DEVICE)
        counted = numbers, len(kept)
    values, summed = kernels.fake_quantize(x, quantizer, flush_stride=flush_stride, counted=counted)
    fake = quantizer.fake(x)
    expected = fake.values.to(x.dtype)
    assert values.dtype is x.dtype
    assert torch.equal(values.isnan(), expected.isnan())
    both = [each.nan_to_num(0).cpu() for each in (values, expected)]
    assert torch.equal(both[0], both[1])
    assert torch.equal(both[0].signbit(), both[1].signbit())
    if not bool(expected.isfinite().all()):
        return
    totals: dict[str, torch.Tensor] = {}
    add_damage(totals, [("x", summed)])
    if mask is not None:
        clips = None if fake.clips is None else tokens_first(fake.clips)[kept]
        x, fake = tokens_first(x)[kept], FakeQuantized(tokens_first(fake.values)[kept], clips)
    row = measure_damage(x, fake, flush_stride=flush_stride)
    error = fake.values - x.float()  # on a CPU squares are summed up in fp32
    row[:2] = torch.stack([each.double().square().sum() for each in (x, error)])
    torch.testing.assert_close(totals["x"], row, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [
        (torch.bfloat16, E4M3FN),
        *(
            pytest.param(dtype, fmt, marks=takes_minutes)
            for dtype, fmt in (
                (torch.bfloat16, E4M3FNUZ),
                (torch.float16, E4M3FN),
                (torch.bfloat16, E5M2),
            )
        ),
    ],
)
@pytest.mark.parametrize("scale", [*in_minutes("1"), *list(SCALES)[1:]])
@pytest.mark.parametrize("way", ["", "in_model_dtype", *in_minutes("by_reciprocal")])
def test_all_codes_of_16_bits_are_rounded_as_torch_does(
    dtype: torch.dtype, fmt: Fp8Format, scale: str, way: str
) -> None:
    """In their order; in groups also small and large ones, NaN and infinity side by side."""
    quantizer = Quantizer(fmt=fmt, **SCALES[scale], **({way: True} if way else {}))
    is_group = quantizer.scale is Granularity.GROUP
    if way == "in_model_dtype" and (is_group or quantizer.scale is Granularity.TOKEN):
        assert not quantizer.fits_kernel  # no engine does that
        return
    assert quantizer.fits_kernel
    codes = ALL_CODES.view(256, 256)
    require_same(codes.view(dtype)[None, None], quantizer)
    if is_group:
        require_same(codes.T.contiguous().view(dtype)[None, None], quantizer)


@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 2),
        st.sampled_from([1, 3]),
        st.integers(1, 40),
        st.sampled_from([1, 64, 200, 700, 1100]),
    ),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    fmt=st.sampled_from([E4M3FN, E4M3FNUZ, E5M2]),
    kind=st.sampled_from(["one", "heads", "tensor", "token", "group", "mx"]),
    is_bounded=st.booleans(),
    power_of_two=st.booleans(),
    by_reciprocal=st.booleans(),
    scale_by_reciprocal=st.booleans(),
    saturates=st.booleans(),
    stride=st.sampled_from([1, 8]),
    is_transposed=st.booleans(),
    is_padded=st.booleans(),
)
def test_tensors_are_quantized_and_measured_as_torch_does(
    shape: tuple[int, int, int, int],
    seed: int,
    dtype: torch.dtype,
    fmt: Fp8Format,
    kind: str,
    is_bounded: bool,
    power_of_two: bool,
    by_reciprocal: bool,
    scale_by_reciprocal: bool,
    saturates: bool,
    stride: int,
    is_transposed: bool,
    is_padded: bool,
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    batch, heads, tokens, size = shape
    x = torch.randn(batch, tokens, heads, size, generator=numbers)
    x *= torch.exp2(torch.randint(-12, 12, x.shape, generator=numbers).float())
    x[torch.rand(x.shape, generator=numbers) < 0.05] = 0
    x[:, tokens // 2, heads // 2] = 0
    x = x.to(dtype).transpose(1, 2)
    x = x if is_transposed else x.contiguous()
    static = torch.rand(heads, 1, 1, generator=numbers) + 0.01
    scales = {"one": static[0, 0], "heads": static, "mx": Granularity.GROUP}
    quantizer = Quantizer(
        fmt=fmt,
        scale=scales[kind] if kind in scales else Granularity(kind),
        block=MX_BLOCK if kind == "mx" else BLOCK,
        by_reciprocal=by_reciprocal,
        scale_by_reciprocal=scale_by_reciprocal,
        power_of_two=power_of_two and not scale_by_reciprocal,
        saturates=saturates,
        largest_amax=1.0 if is_bounded else None,
    ).to(torch.device(DEVICE))
    assert quantizer.fits_kernel
    mask = torch.rand(batch, tokens, generator=numbers) < 0.7 if is_padded else None
    if mask is not None:
        mask[0, -1] = True
    require_same(x, quantizer, flush_stride=stride, mask=mask)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
@pytest.mark.parametrize("lengths", [(24, 11, 1), *in_minutes((24,))])
@pytest.mark.parametrize("family", ["mixtral", *in_minutes("llama")])
def test_a_model_is_emulated_as_without_the_kernel(family: str, lengths: tuple[int, ...]) -> None:
    """K, V, q and inputs of a model whose V is a view: last hidden states, and the damage."""
    model = zoo.build(family, num_hidden_layers=1).to(torch.bfloat16)
    names = {name: name for name, _ in model.named_parameters()}
    geometry = find_geometry(model, names, checkpoint_dtype="bfloat16")[0]
    emulations = make_emulations(geometry)
    quantizers = emulations["w8a8 dynamic"] | emulations["kv"]
    ids = torch.arange(24 * len(lengths)).view(-1, 24)
    batch = Batch(first=0, input_ids=ids, lengths=lengths)
    answers = []
    for has_kernels in (True, False):
        with gpu(has_kernels=has_kernels):
            decoder, hooks = (
                Decoder(model.to("cuda:0")),
                EmulationHooks(Candidate(quantizers=quantizers)),
            )
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


def compare_trial() -> bool:
    trial = probabilities.make_p_trial(torch.device(DEVICE))
    return agree(*trial, tolerance=probabilities.TOLERANCE)


FLAWS: dict[str, dict[str, Any]] = {
    "three bits fewer": {"carry": 2.0**23},
    "subnormals as in e5m2": {"smallest_normal": 2.0**-14},
    "one largest score for all tiles": {"is_tiled": False},
    "no sinks": {"has_sinks": False},
    "keys cut off": {"num_columns": 64},
}
OTHER_FLAWS = ("subnormals as in e5m2", "one largest score for all tiles", "keys cut off")
OTHER_FLAWS += ("another first query",)


@pytest.mark.parametrize(
    "flaw", ["three bits fewer", "no sinks", "other tiles", *in_minutes(*OTHER_FLAWS)]
)
def test_a_kernel_that_computes_probabilities_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    launch = kernels.kernels.launch
    changed = FLAWS.get(flaw, {})
    number = {"another first query": 8, "other tiles": 9}.get(flaw)

    def change(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        assert all(constants[name] != value for name, value in changed.items())
        given = [each + (at == number) for at, each in enumerate(arguments)]
        launch(kernel, grid, *given, **constants | changed)

    assert compare_trial()
    monkeypatch.setattr(kernels.kernels, "launch", change)
    with pytest.warns(UserWarning, match="a kernel is not used: .*P.* differ from torch's"):
        assert not compare_trial()
