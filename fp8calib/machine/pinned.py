"""Copy weights to a GPU through pinned memory, beside what the GPU computes.

The copies run on a stream of their own. Device memory is allocated on it, and `StartedCopy.use`
records the stream that reads it, so that torch gives it to no other tensor before both are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BUFFER_BYTES = 2**24
NUM_BUFFERS = 2
"""One is filled while the GPU reads the other."""


@dataclass(frozen=True, slots=True)
class StartedCopy:
    """A tensor that is being copied to a device."""

    tensor: torch.Tensor
    is_copied: torch.cuda.Event | None
    """None where there is nothing to wait for."""

    def use(self) -> torch.Tensor:
        """Give the tensor; what the current stream computes from now on sees all of it."""
        if self.is_copied is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.is_copied)
            self.tensor.record_stream(stream)
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Buffer:
    room: torch.Tensor
    """uint8, pinned."""
    is_read: torch.cuda.Event
    """When the GPU has read what was last put into it."""


class PinnedCopier:
    """Copies tensors to a device through two pinned buffers; for one thread at a time."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._buffers: list[_Buffer] = []
        self._stream: torch.cuda.Stream | None = None

    def start(self, tensor: torch.Tensor) -> StartedCopy:
        """Start to copy a tensor, which may be reused at once."""
        if self._device.type == "cpu" or tensor.device.type != "cpu":
            return StartedCopy(tensor.to(self._device), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            found = torch.empty_like(tensor, device=self._device)
            if tensor.is_contiguous():
                self._copy_parts(*(x.view(-1).view(torch.uint8) for x in (tensor, found)))
            else:
                found.copy_(tensor)
            return StartedCopy(found, _record_event())

    def _copy_parts(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for start in range(0, len(source), self._buffer_bytes):
            part = source[start : start + self._buffer_bytes]
            room = self._free_buffer()
            pinned = room[: len(part)].copy_(part)
            target[start : start + len(part)].copy_(pinned, non_blocking=True)
            self._buffers.append(_Buffer(room, _record_event()))

    def _free_buffer(self) -> torch.Tensor:
        """Give a new buffer, or the one that was used longest ago once the GPU has read it."""
        if len(self._buffers) < NUM_BUFFERS:
            return torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=True)
        oldest = self._buffers.pop(0)
        oldest.is_read.synchronize()
        return oldest.room


def _record_event() -> torch.cuda.Event:
    """Mark the end of what the current stream has been given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
