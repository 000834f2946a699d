"""Copies through pinned memory, on a GPU that reads as late as it may."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from fp8calib.machine import pinned
from fp8calib.machine.pinned import PinnedCopier
from tests.simulated_gpus import simulated_gpus

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles simulated GPUs")
SHAPES = ((7, 9), (1,), (), (0, 4), (16, 16))


class LateGpu:
    """Runs copies from pinned memory only when an event of a later mark is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.most_waiting = 0

    def run(self, count: int) -> None:
        """Run the oldest copies."""
        while count and self.queue:
            self.queue.pop(0)()
            count -= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_buffer_is_filled_again_only_when_the_gpu_has_read_it(dtype: torch.dtype) -> None:
    """Buffers of 64 bytes: the copies of several tensors take turns."""
    gpu = LateGpu()

    class Event:
        def record(self) -> None:
            assert gpu.queue  # a copy was started before

        def synchronize(self) -> None:
            gpu.run(1)  # the oldest copy: the one from the buffer that is used next

    at_once = torch.Tensor.copy_

    def copy_(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if not non_blocking:
            return at_once(target, source)
        gpu.queue.append(lambda: at_once(target, source))
        gpu.most_waiting = max(gpu.most_waiting, len(gpu.queue))
        return target

    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    with (
        simulated_gpus(1),
        patch.object(pinned, "BUFFER_BYTES", 64),
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.Tensor, "copy_", copy_),
    ):
        copier = PinnedCopier(torch.device("cuda:0"))
        found = [copier.copy(tensor) for tensor in tensors]
        assert gpu.queue
        gpu.run(len(gpu.queue))
        copied = [tensor.cpu() for tensor in found]
        assert all(tensor.device.type == "cuda" for tensor in found)
    assert gpu.most_waiting == 2
    for ours, theirs in zip(copied, tensors, strict=True):
        assert torch.equal(ours, theirs)


def test_a_cpu_needs_no_copy_and_transposed_tensors_keep_their_strides() -> None:
    tensor = torch.randn(4, 6)
    assert PinnedCopier(torch.device("cpu")).copy(tensor) is tensor
    with simulated_gpus(1):
        found = PinnedCopier(torch.device("cuda:0")).copy(tensor.T)
        assert found.device.type == "cuda"
        assert found.stride() == tensor.T.stride()
        assert torch.equal(found.cpu(), tensor.T)
