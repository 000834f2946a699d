"""How many kernels observation adds to a forward pass, on simulated GPUs."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch

from fp8calib.calibration import calibrate, reductions
from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.recorder import Recorder
from fp8calib.model.topology import find_geometry
from scripts.benchmarks.launches import (
    HAS_KERNELS,
    WorkCounter,
    count_all,
    count_emulation,
    make_emulations,
)
from tests import zoo
from tests.doors import LENGTHS, as_bytes, opened, rows_of
from tests.kit.minutes import in_minutes, takes_minutes
from tests.simulated_gpus import gpu

OTHERS = ("mixtral", "qwen3_next", "deepseek_v3")

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="simulated GPUs are compiled by g++"
)


def quicken(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our kernels do nothing in a llama: their interpreter is slow.

    In other families their values choose experts, and so decide what is launched.
    """
    if family == "llama":
        kernels = import_module("fp8calib.calibration.kernels")
        monkeypatch.setattr(kernels, "launch", lambda *_, **__: None)


@pytest.mark.skipif(not HAS_KERNELS, reason="Triton is in the extra `test`")
@pytest.mark.parametrize("family", ["llama", *in_minutes(*OTHERS)])
def test_observation_and_emulation_add_few_launches_to_those_of_the_decoder(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In llama a tensor takes one kernel, and all sites share those that update the statistics."""
    quicken(family, monkeypatch)
    ((_, work, emulations),) = count_all([family], seq_len=128)
    assert 0 < work.observation.launches <= 0.18 * work.decoder.launches
    assert work.with_histograms.launches <= 0.18 * work.decoder.launches
    assert work.observation.launches <= work.with_histograms.launches
    assert work.observation.waits == work.with_histograms.waits == 0
    shares = {name: each.launches / work.decoder.launches for name, each in emulations.items()}
    assert 0 < shares["kv"] <= 0.15
    assert shares["kv"] <= shares["kv + P"] <= 0.18
    assert 0 < shares["w8a8 static"] <= 0.16
    assert 0 < shares["w8a8 dynamic"] <= 0.16
    assert not any(each.waits for each in emulations.values())
    if family == "llama":  # layers x (k, v, 4 different inputs), 4 for all sites
        assert work.observation.launches == 4 * 6 + 4


@pytest.mark.skipif(not HAS_KERNELS, reason="Triton is in the extra `test`")
@pytest.mark.parametrize(
    ("family", "per_layer"), [("llama", 0), pytest.param("mixtral", 8, marks=takes_minutes)]
)
def test_emulation_of_a_padded_batch_adds_as_few(
    family: str, per_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are no padding are numbered once, and sorted rows of experts in each layer."""
    quicken(family, monkeypatch)
    model = zoo.build(family).to(torch.bfloat16)
    names = {name: name for name, _ in model.named_parameters()}
    geometry = find_geometry(model, names, checkpoint_dtype="bfloat16")[0]
    emulations = make_emulations(geometry)
    with gpu(has_kernels=True):
        model.to("cuda:0")
        for name in ("kv", "w8a8 static", "w8a8 dynamic"):
            plain, padded = (
                count_emulation(model, geometry, emulations[name], seq_len=16, is_padded=is_padded)
                for is_padded in (False, True)
            )
            assert padded.waits == plain.waits == 0
            numbering = 1 + per_layer * len(geometry.layers) * name.startswith("w8a8")
            assert padded.launches <= plain.launches + numbering


def test_the_host_waits_for_a_gpu_behind_the_passes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics stay on the GPU, those of weights too; a longer text takes no more waits."""
    monkeypatch.setattr(calibrate, "INTERVAL_S", 600.0)  # else a slow machine looks for NaN between
    zoo.save("mixtral", tmp_path / "model")
    waits = []
    for lengths in (LENGTHS[:2], LENGTHS[:6]):
        with (
            gpu(),
            opened(tmp_path / "model", device="cuda:0") as subject,
            WorkCounter(torch.device("cuda")) as counter,
        ):
            stats = subject.calibrate(plan=rows_of(lengths), batch_size=1)
        waits.append(counter.work.waits)
    copied = sum(len(each.tensors) for each in stats.sites.values())
    assert waits == [copied + 1] * 2  # one look for NaN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_batch_waits_for_nothing_on_a_real_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second batch on: before it kernels are compiled, and memory is taken."""
    zoo.save("llama", tmp_path / "model")
    begin_batch, end_batch = Recorder.begin_batch, Recorder.end_batch

    def begin(recorder: Recorder, batch: BatchView) -> None:
        torch.cuda.set_sync_debug_mode("error" if recorder.sequences else "default")
        begin_batch(recorder, batch)

    def end(recorder: Recorder) -> None:
        end_batch(recorder)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Recorder, "begin_batch", begin)
    monkeypatch.setattr(Recorder, "end_batch", end)
    with opened(tmp_path / "model", device="cuda:0") as subject:
        assert subject.calibrate(plan=rows_of([16] * 4), batch_size=1).sites


@pytest.mark.parametrize(("family", "tried"), [("llama", 1), ("mixtral", 2)])
def test_kernels_that_a_model_needs_are_tried_before_the_batches(
    family: str, tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial copies to and from the GPU; a dense model tries no kernel of experts."""
    zoo.save(family, tmp_path / "model")
    seen: list[str] = []
    begin_batch = Recorder.begin_batch
    with gpu(), opened(tmp_path / "model", device="cuda:0") as subject:
        monkeypatch.setattr(reductions, "has_kernel", lambda name, _: seen.append(name))
        monkeypatch.setattr(
            Recorder,
            "begin_batch",
            lambda recorder, batch: (seen.append("batch"), begin_batch(recorder, batch)),
        )
        subject.calibrate(batch_size=4)
    trials = ["reduce_heads", "reduce_experts"][:tried]
    assert seen[: tried + 1] == [*trials, "batch"]
    assert {*seen} == {*trials, "batch"}


@pytest.mark.skipif(not HAS_KERNELS, reason="Triton is in the extra `test`")
def test_a_run_with_kernels_writes_the_same_file(tmp_path: Path) -> None:
    """Padded batches, experts, and a histogram of the ninth sequence."""
    zoo.save("mixtral", tmp_path / "model", num_hidden_layers=1)
    plan = rows_of(LENGTHS[:9])
    written = []
    for has_kernels in (True, False):
        with (
            gpu(has_kernels=has_kernels),
            opened(tmp_path / "model", device="cuda:0") as subject,
        ):
            written.append(as_bytes(subject.calibrate(plan=plan, batch_size=5), tmp_path))
    assert written[0] == written[1]
