"""Candidate on a GPU, or on a simulated one, beside the CPU's."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8calib.calibration.streamed_model import open_streamed
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import batches, find_distinct_tokens
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import VerificationError
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import SCHEMES, Granularity
from fp8calib.verification import score as score_module
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import (
    Quantizer,
    add_damage,
    measure_damage,
    sum_damage,
)
from fp8calib.verification.emulation.weights import Requantized
from fp8calib.verification.score import score
from scripts.benchmarks.launches import WorkCounter, make_emulations
from tests import zoo
from tests.doors import opened, rows_of
from tests.kit.minutes import in_minutes, takes_minutes
from tests.simulated_gpus import simulated_gpus
from tests.verification.by_hand import emulate_scheme, make_subject

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
STATIC = torch.tensor(0.0371)
REFERENCE = find_emulated("reference")[1]
SILENT: Any = SimpleNamespace(advance=lambda _tokens: None)


def gpu() -> AbstractContextManager[None]:
    return nullcontext() if torch.cuda.is_available() else simulated_gpus(1)


@pytest.mark.parametrize(
    ("stride", "dtype", "saturates"), [(1, torch.float32, False), (8, torch.bfloat16, True)]
)
@pytest.mark.parametrize("scale", [STATIC, Granularity.TOKEN])
def test_damage_on_a_gpu_is_that_on_a_cpu(
    stride: int, dtype: torch.dtype, saturates: bool, scale: torch.Tensor | Granularity
) -> None:
    """Of two tensors, one of them under two keys and twice; values clip and vanish."""
    quantizer = Quantizer(fmt=E4M3FN, scale=scale, by_reciprocal=True, saturates=saturates)
    generator = torch.Generator().manual_seed(3)
    tensors = [
        (torch.randn(n, 50, generator=generator) * torch.logspace(-9, 6, 50)).to(dtype)
        for n in (40, 24)
    ]
    settings: Any = {"flush_stride": stride}
    rows = [measure_damage(x, quantizer.fake(x), **settings) for x in tensors]
    expected = {"a": sum_damage([rows[0]] * 2), "b": sum_damage(rows), "c": rows[1]}
    with gpu():
        totals: dict[str, torch.Tensor] = {}
        on_gpu = [x.cuda() for x in tensors]
        placed = quantizer.to(on_gpu[0].device)
        fakes = [placed.fake(x) for x in on_gpu]
        for x, fake in zip(tensors, fakes, strict=True):
            assert torch.equal(fake.values.cpu(), quantizer.fake(x).values)
        first, second = (
            measure_damage(x, fake, **settings) for x, fake in zip(on_gpu, fakes, strict=True)
        )
        for _ in range(2):
            rows = (first, first, first, second, second)
            add_damage(totals, zip("aabbc", rows, strict=True))
        found = {key: total.cpu() for key, total in totals.items()}
    for key, total in expected.items():
        doubled = torch.cat([2 * total[:-1], total[-1:]])
        torch.testing.assert_close(found[key], doubled, rtol=1e-6, atol=0)
    assert (expected["a"][2] > 0) == isinstance(scale, torch.Tensor)


@pytest.mark.parametrize(
    ("streamed", "second", "own"),
    [(False, 13, 2), *(pytest.param(each, 20, 0, marks=takes_minutes) for each in (False, True))],
)
def test_scores_wait_for_a_gpu_behind_the_passes_alone(
    streamed: bool, second: int, own: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K, V, P and inputs are quantized, and measured; a longer text takes no more waits.

    With padding transformers looks at the mask twice in each pass.
    """
    monkeypatch.setattr(score_module, "_LOOK_S", 600.0)  # a slow machine
    zoo.save("llama", tmp_path / "model")
    waits = []
    with gpu():
        for num_rows in (2, 2, 6):
            text = list(batches(rows_of([20, second] * (num_rows // 2)), 2))
            options: Any = {"copies_ahead": True, "hidden_gpu_bytes": 1 << 22} if streamed else {}
            with opened(tmp_path / "model", streamed=streamed, device="cuda", **options) as subject:
                made = make_emulations(subject.prepared.geometry)
                candidates = [
                    Candidate(name=name, quantizers=made[name])
                    for name in ("kv + P", "w8a8 static", "w8a8 dynamic")
                ]
                hooks = MeasurementHooks(
                    [
                        Candidate(
                            name=name,
                            quantizers={
                                site: replace(each, is_scaled=name == "1")
                                for site, each in made["kv"].items()
                            },
                        )
                        for name in ("1", "own")
                    ]
                )
                model: Any = nullcontext(subject.prepared)
                if subject.mode.is_streamed:
                    tokens = find_distinct_tokens(text)
                    model = open_streamed(
                        *(subject.prepared, tokens, subject.mode),
                        subject.device,
                    )
                with model as run, WorkCounter(torch.device("cuda")) as counter:
                    score(run, candidates, text, hooks, progress=SILENT)
                assert len(hooks.found) == 2 * len(made["kv"])
            waits.append(counter.work.waits)
    assert waits[2] - waits[1] == own * (6 - 2) // 2 * (1 + len(candidates))


@pytest.mark.parametrize("family", ["mixtral", *in_minutes("llama")])
def test_a_gpu_with_room_keeps_the_weights_that_a_candidate_changes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change once and are never read again; without room they do for each batch."""
    zoo.save(family, tmp_path / "model")
    text = list(batches(rows_of([9] * 6), 2))
    calls: list[str] = []

    def spy(kind: type, name: str) -> None:
        plain = getattr(kind, name)

        def call(own: Any, given: Any) -> Any:
            calls.append(name)
            return plain(own, given)

        monkeypatch.setattr(kind, name, call)

    spy(Requantized, "apply")
    spy(WeightSource, "read")
    spy(WeightSource, "read_experts")
    klds = []
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(score_module, "free_bytes", lambda _device: 0)
        with (
            gpu(),
            opened(tmp_path / "model", device="cuda") as subject,
            Checkpoint.open(tmp_path / "model") as checkpoint,
        ):
            model = subject.prepared.model
            candidate = emulate_scheme(
                make_subject(model, checkpoint), SCHEMES["fp8-dynamic"], REFERENCE
            )
            before = {name: x.cpu() for name, x in model.named_parameters()}
            calls.clear()
            scores = score(subject.prepared, [candidate], text, progress=SILENT)
            times = 1 if has_room else len(text)
            assert calls.count("apply") == times * len(candidate.weights)
            assert ({*calls} == {"apply"}) is has_room
            for name, x in model.named_parameters():
                assert torch.equal(x.cpu(), before[name]), name
            klds.append(scores.candidates[candidate.name].klds)
    assert torch.equal(*klds)
    assert klds[0].mean() > 0


def test_nan_of_a_batch_that_waits_on_a_gpu_names_the_sample(tmp_path: Path) -> None:
    """One word, which only the seventh sequence has, makes NaN."""
    zoo.save("llama", tmp_path / "model")
    plan = rows_of([9] * 8)
    plan.sequences[6][3] = 127
    assert sum(int((ids == 127).sum()) for ids in plan.sequences) == 1
    with gpu(), opened(tmp_path / "model", device="cuda") as subject:
        embedding = subject.prepared.model.get_input_embeddings()
        with torch.no_grad():
            embedding.weight[127] = torch.nan
        with pytest.raises(VerificationError, match=r"unquantized model: NaN or inf .* sample 6 "):
            score(subject.prepared, (), list(batches(plan, 2)), progress=SILENT)
