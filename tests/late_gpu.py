"""A simulated GPU whose copies from pinned memory are made as late as its events allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from tests.simulated_gpus import simulated_gpus

_copy_at_once = torch.Tensor.copy_


@dataclass(eq=False)
class _Stream:
    """The copies of one stream that are not made yet."""

    gpu: LateGpu
    todo: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0

    def wait_event(self, event: _Event) -> None:
        self.gpu.log.append("compute waits")
        event.make_copies()


@dataclass(eq=False)
class _Event:
    """A mark in the stream that is the current one when it is recorded."""

    gpu: LateGpu
    stream: _Stream | None = None
    place: int = 0

    def record(self) -> None:
        self.stream = self.gpu.current_stream()
        self.place = self.stream.num_done + len(self.stream.todo)

    def synchronize(self) -> None:
        self.gpu.log.append("host waits")
        self.make_copies()

    def make_copies(self) -> None:
        stream = self.stream
        assert stream is not None
        while stream.num_done < self.place:
            stream.todo.pop(0)()
            stream.num_done += 1


class LateGpu:
    """What a GPU was asked to do, in order.

    Computations run at once, and see NaN where a copy was not waited for.

    Attributes:
        log: `start copy`, `host waits`, `compute waits`, and what a test adds.
        recorded: the tensors in use on the stream that computes.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recorded: list[torch.Tensor] = []
        self._compute = _Stream(self)
        self._of_thread = threading.local()

    def current_stream(self, _device: object = None) -> _Stream:
        """Give the current stream of the thread."""
        found: _Stream = getattr(self._of_thread, "stream", self._compute)
        return found

    @contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if not non_blocking:
            return _copy_at_once(target, source)
        assert target.dtype == torch.uint8
        assert self.current_stream() is not self._compute
        target.fill_(255)  # NaN in bfloat16 and float32
        self.log.append("start copy")
        self.current_stream().todo.append(lambda: _copy_at_once(target, source))
        return target


@contextmanager
def late_gpu() -> Iterator[LateGpu]:
    """Simulate a GPU that makes a copy only when an event after it is waited for."""
    gpu = LateGpu()

    def copy_(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        return gpu._copy(target, source, non_blocking)

    def record_stream(tensor: torch.Tensor, stream: _Stream) -> None:
        assert stream is gpu._compute
        gpu.recorded.append(tensor)

    as_late = {
        "Event": lambda: _Event(gpu),
        "Stream": lambda _device: _Stream(gpu),
        "current_stream": gpu.current_stream,
        "stream": gpu._on,
    }
    with (
        simulated_gpus(1),
        mock.patch.multiple(torch.cuda, **as_late),
        mock.patch.object(torch.Tensor, "copy_", copy_),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
    ):
        yield gpu
