"""Copies through pinned memory, on a GPU that makes them as late as it may."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fp8calib.geometry.model_geometry import Layer
from fp8calib.machine.pinned import PinnedCopier
from fp8calib.run.memory_plan import whole_or_streamed
from fp8calib.run.memory_plan.stream_plan import StreamPlanner
from fp8calib.run.streaming.model import StreamedLayer, StreamedModel
from fp8calib.run.streaming.weights import ModelPart
from tests import zoo
from tests.cli.program import Outcome, snapshot, succeed
from tests.cli.test_ranks import make_rows
from tests.late_gpu import late_gpu
from tests.simulated_gpus import simulated_gpus

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
SHAPES = ((7, 9), (1,), (), (0, 4), (16, 16))
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_buffer_is_filled_again_only_when_the_gpu_has_read_it(dtype: torch.dtype) -> None:
    """Buffers of 64 bytes: the copies of several tensors take turns."""
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    with late_gpu() as gpu:
        copier = PinnedCopier(CUDA, 64)
        started = [copier.start(tensor.clone()) for tensor in tensors]
        num_copies = gpu.log.count("start copy")
        assert num_copies == sum(-(-tensor.nbytes // 64) for tensor in tensors)
        waits = ["host waits", "start copy"] * (num_copies - 2)
        assert gpu.log == ["start copy"] * 2 + waits
        assert not gpu.recorded
        used = [copy.use() for copy in started]
        assert [id(tensor) for tensor in gpu.recorded] == [id(tensor) for tensor in used]
        copied = [tensor.cpu() for tensor in used]
        assert all(tensor.device == CUDA for tensor in used)
    for ours, theirs in zip(copied, tensors, strict=True):
        assert torch.equal(ours, theirs)


def test_a_cpu_needs_no_copy_and_transposed_tensors_keep_their_strides() -> None:
    tensor = torch.randn(4, 6)
    assert PinnedCopier(torch.device("cpu")).start(tensor).use() is tensor
    with simulated_gpus(1):
        found = PinnedCopier(CUDA).start(tensor.T).use()
        assert found.device.type == "cuda"
        assert found.stride() == tensor.T.stride()
        assert torch.equal(found.cpu(), tensor.T)


@pytest.mark.parametrize("of", ["calibrate", "verify"])
def test_a_layer_is_copied_while_the_last_one_runs(of: str, tmp_path: Path) -> None:
    """Let a layer run only when the copies of the next one were started."""
    zoo.save("llama", tmp_path / "model", num_hidden_layers=3)
    data = ("--data", make_rows(tmp_path / "rows.jsonl", 4), "--samples", 4, "--seq-len", 32)
    command = (of, tmp_path / "model", *data, "--batch-size", 2, "--no-pack", "--device", "cuda")
    if of == "verify":
        command = (*command, "--scheme", "w8a16", "--json")
    placed, read = StreamedModel.placed, StreamedModel._read
    is_read = [threading.Event() for _ in range(3)]
    ran: list[int] = []

    def reading(model: StreamedModel, layer: Layer, part: ModelPart, *, copies: bool) -> Any:
        found = read(model, layer, part, copies=copies)
        assert copies is (layer.index > 0)
        is_read[layer.index].set()
        return found

    def run(out: str) -> Outcome:
        fits = mock.patch.object(whole_or_streamed, "plan_whole", return_value=None)
        with fits:
            return succeed(*command, *(() if of == "verify" else ("--out", tmp_path / out)))

    with late_gpu() as gpu:

        @contextmanager
        def placing(model: StreamedModel, layer: StreamedLayer, *, keep: bool = False) -> Any:
            index = layer.layer.index
            with placed(model, layer, keep=keep):
                if 0 < len(ran) < 3:  # the first one is the probe's
                    assert is_read[index + 1].wait(20)
                ran.append(index)
                gpu.log.append(f"run {index}")
                yield

        with (
            mock.patch.object(StreamedModel, "placed", placing),
            mock.patch.object(StreamedModel, "_read", reading),
        ):
            late = run("late")
    assert ran == [0, 0, 1, 2]
    log = [entry for entry in gpu.log if entry != "host waits"]
    first, last = log.index("run 0", log.index("run 0") + 1), log.index("run 2")
    between = {i: log[log.index(f"run {i}", first) : log.index(f"run {i + 1}")] for i in (0, 1)}
    assert log[first - 9 : first] == ["start copy"] * 9
    assert between[0][1:] == ["compute waits"] * 9 + ["start copy"] * 9
    assert log[last - 9 : last] == between[1][1:] == ["compute waits"] * 9
    with simulated_gpus(1), mock.patch.object(StreamPlanner, "_fits_ahead", return_value=False):
        plain = run("plain")
    if of == "verify":
        assert late.json["candidates"] == plain.json["candidates"]
    else:
        names = ("late", "plain")
        one, two = ((tmp_path / name / "stats.safetensors").read_bytes() for name in names)
        assert one == two


def test_chunks_of_weights_are_waited_for_before_they_are_quantized(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    command = ("quantize", tmp_path / "model", "--scheme", "fp8-block", "--allow-unservable")
    succeed(*command, "--out", tmp_path / "cpu")
    with late_gpu() as gpu:
        said = succeed(*command, "--device", "cuda", "--out", tmp_path / "gpu").err
    assert gpu.log.count("compute waits") == len(gpu.recorded) > 0
    assert "copied to the GPU through pinned buffers" in said
    assert snapshot(tmp_path / "gpu") == snapshot(tmp_path / "cpu")
