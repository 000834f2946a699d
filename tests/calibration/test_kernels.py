"""The kernel of calibration, in Triton's interpreter, against torch's operations: bit for bit."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.calibration import reductions
from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.calibration_stats import SiteStats, join
from fp8calib.calibration.kernel_trial import agree
from fp8calib.model.geometry import Role, Site
from tests.kit.minutes import HAS_MINUTES, takes_minutes

kernels: Any = pytest.importorskip(
    "fp8calib.calibration.kernels", reason="Triton is in the extra `test`"
)
HAS_GPU = torch.cuda.is_available()
SITE = Site("model.layers.0.mlp.up_proj", Role.INPUT)
DEVICE = "cuda:0" if HAS_GPU else "cpu"
EXAMPLES = 20 if HAS_MINUTES else 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Drawn:
    """A batch, and numbers for tensors of it."""

    batch: BatchView
    seed: int
    dtype: torch.dtype

    def tensor(self, *shape: int) -> torch.Tensor:
        """Draw magnitudes over all octaves of the histogram, and zeros."""
        numbers = torch.Generator().manual_seed(self.seed)
        x = torch.randn(shape, generator=numbers)
        x *= torch.exp2(torch.randint(-44, 28, shape, generator=numbers).float())
        x[torch.rand(shape, generator=numbers) < 0.05] = 0
        return x.to(self.dtype).to(DEVICE)


@st.composite
def drawn(draw: Any) -> Drawn:
    longest = draw(st.sampled_from([2, 17, 128, 129, 511, 513, 1100]))
    size = draw(st.integers(1, 4 if longest < 500 or HAS_MINUTES else 2))
    lengths = [longest] * size
    if draw(st.booleans()):
        lengths = [longest, *(draw(st.integers(1, longest)) for _ in range(size - 1))]
    batch = BatchView(
        shape=(size, longest), lengths=tuple(lengths), first=draw(st.integers(0, 2**31 - 9))
    )
    return Drawn(batch, draw(st.integers(0, 2**31)), draw(st.sampled_from(DTYPES)))


def require_same(found: SiteStats, expected: SiteStats) -> None:
    assert found.count == expected.count
    assert found.tensors.keys() == expected.tensors.keys()
    for name, x in expected.tensors.items():
        other = found.tensors[name].cpu()
        assert other.dtype is x.dtype, name
        assert torch.equal(other.nan_to_num(-1), x.cpu().nan_to_num(-1)), name


def both(observe: Any, *arguments: Any) -> tuple[SiteStats, SiteStats]:
    """Reduce by the kernel and by torch."""
    answers = []
    for has_kernel in (True, False):
        with mock.patch.object(reductions, "has_kernel", return_value=has_kernel):
            answers.append(observe(*arguments))
    return answers[0], answers[1]


@settings(max_examples=EXAMPLES)
@given(drawn(), st.sampled_from([1, 3, 64, 80, 130]), st.booleans())
def test_an_input_is_reduced_as_torch_does(case: Drawn, channels: int, is_flat: bool) -> None:
    x = case.tensor(*case.batch.shape, channels)
    x = x.flatten(0, 1) if is_flat else x
    require_same(*both(reductions.observe_input, case.batch, SITE, x))


@settings(max_examples=EXAMPLES)
@given(
    drawn(),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (2, 4)]),
    st.sampled_from([1, 8, 80, 192]),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_heads_are_reduced_as_torch_does(
    case: Drawn, heads: tuple[int, int], size: int, token_stride: int, is_transposed: bool
) -> None:
    """K and V come as views of one layout and of another; Falcon repeats its heads."""
    num_heads, copies = heads
    sequences, tokens = case.batch.shape
    shape = (sequences, num_heads * copies, tokens, size)
    x = case.tensor(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    x = x if is_transposed else x.contiguous()
    require_same(*both(reductions.reduce_tokens, case.batch, x, num_heads, token_stride))


@settings(max_examples=EXAMPLES)
@given(
    drawn(),
    st.sampled_from([1, 5, 64, 160]),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (40, 3)]),
    st.sampled_from([1, 4, 24]),
)
def test_inputs_of_down_are_reduced_as_torch_does(
    case: Drawn, channels: int, experts: tuple[int, int], block: int
) -> None:
    """Rows sorted by expert, many to an expert or few, some experts without any."""
    num_experts, num_routed = experts
    sequences, tokens = case.batch.shape
    numbers = torch.Generator().manual_seed(case.seed)
    index = torch.rand(sequences * tokens, num_experts, generator=numbers).topk(num_routed).indices
    rows = case.tensor(sequences * tokens * num_routed, channels)
    routing = index.to(DEVICE), num_experts + 1, block
    require_same(*both(reductions.observe_expert_down, case.batch, rows, *routing))


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_pass(value: float) -> None:
    batch = BatchView(shape=(2, 600), lengths=(600, 600), first=7)
    x = torch.ones(2, 600, 24, device=DEVICE)
    x[1, 550, 3] = value
    found, expected = both(reductions.observe_input, batch, SITE, x)
    require_same(found, expected)
    assert not found.tensors["amax"][3].isfinite()
    assert not found.tensors["positions"][1].isfinite()
    assert found.tensors["sequences"].isfinite().tolist() == [True, False]


@pytest.mark.parametrize("has_kernel", [True, False])
def test_statistics_do_not_depend_on_the_batch(has_kernel: bool) -> None:
    """Nine sequences at once, or by four and one; without the interpreter, of two ranges."""
    numbers = torch.Generator().manual_seed(1)
    length = 130 if has_kernel and not HAS_MINUTES else 514
    x = torch.randn(9, 2, length, 8, generator=numbers).to(DEVICE, torch.bfloat16)
    answers = []
    with mock.patch.object(reductions, "has_kernel", return_value=has_kernel):
        for size in (9, 4):
            joined: dict[str, torch.Tensor] = {}
            for first in range(0, 9, size):
                rows = x[first : first + size]
                batch = BatchView(
                    shape=(len(rows), length), lengths=(length,) * len(rows), first=first
                )
                seen = reductions.reduce_tokens(batch, rows, 2, 1).tensors
                inputs = rows.transpose(1, 2).flatten(2)
                seen |= {
                    f"input {name}": each
                    for name, each in reductions.observe_input(batch, SITE, inputs).tensors.items()
                }
                for name, new in seen.items():
                    if name.endswith("sequences"):
                        joined[name] = torch.cat([joined.get(name, new[:0]), new])
                    elif name in joined:
                        joined[name] = join(name.split()[-1], joined[name], new)
                    else:
                        joined[name] = new
            answers.append(joined)
    assert len(answers[0]) == 8
    for other in answers[1:]:
        assert all(torch.equal(other[name], each) for name, each in answers[0].items())


@pytest.mark.parametrize("name", ["reduce_heads", "reduce_experts"])
def test_a_kernel_that_fails_or_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    trial = reductions.make_trial(name, torch.device(DEVICE))
    assert agree(*trial)
    monkeypatch.setattr(kernels, "launch", fail)
    with pytest.warns(UserWarning, match="a kernel is not used: no compiler"):
        assert not agree(*trial)
    monkeypatch.setattr(kernels, "launch", lambda *_, **__: None)
    with pytest.warns(UserWarning, match="amax, .*positions, .* differ from torch's"):
        assert not agree(*reductions.make_trial(name, torch.device(DEVICE)))
    assert not reductions.has_kernel(name, torch.device("cpu"))


def test_a_kernel_is_not_given_up_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    trial = reductions.make_trial("reduce_heads", torch.device(DEVICE))
    monkeypatch.setattr(kernels, "launch", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        agree(*trial)


@takes_minutes
def test_kernels_compile_for_gpus() -> None:
    """The interpreter accepts more than the compiler."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.calibration.program_compiling"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr
