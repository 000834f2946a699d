"""Copy weights to a GPU through pinned memory, which a GPU reads while the CPU goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BUFFER_BYTES = 2**24
_NUM_BUFFERS = 2
PINNED_BYTES = _NUM_BUFFERS * BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class _Buffer:
    room: torch.Tensor
    """uint8, pinned."""
    is_read: torch.cuda.Event
    """The GPU has read what was last put into it."""


class PinnedCopier:
    """Copies tensors to a device; for one thread.

    On a GPU one of two buffers is filled while the other is read. Copies run on the current stream:
    what is computed after `copy` sees the whole tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the tensor on the device; it may be reused at once."""
        if self._device.type == "cpu" or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return tensor.to(self._device)
        found = torch.empty_like(tensor, device=self._device)
        source, target = (each.view(-1).view(torch.uint8) for each in (tensor, found))
        with torch.cuda.device(self._device):
            for start in range(0, len(source), BUFFER_BYTES):
                self._copy_part(source[start:], target[start:])
        return found

    def _copy_part(self, source: torch.Tensor, target: torch.Tensor) -> None:
        buffer = self._next_buffer()
        part = buffer.room[: len(source)]
        part.copy_(source[: len(part)])
        target[: len(part)].copy_(part, non_blocking=True)
        buffer.is_read.record()
        self._buffers.append(buffer)

    def _next_buffer(self) -> _Buffer:
        """Give a new buffer, or the one that was used longest ago once the GPU has read it."""
        if len(self._buffers) < _NUM_BUFFERS:
            room = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            return _Buffer(room, torch.cuda.Event())  # type: ignore[no-untyped-call]
        buffer = self._buffers.pop(0)
        buffer.is_read.synchronize()
        return buffer
