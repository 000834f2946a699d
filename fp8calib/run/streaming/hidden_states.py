"""The hidden states between two layers: in memory up to a limit, beyond it in a mapped file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch.utils import _pytree as pytree

from fp8calib.errors import CalibrationError
from fp8calib.machine.units import format_gib

_ALIGNMENT = 64
_SEGMENT_BYTES = 64 * 2**20


class HiddenStateStore:
    """Stores trees of tensors by key, such as a number; a context manager.

    The file has no name: it is gone however the process ends. Its disk space is allocated when it
    is mapped, so that a full disk is an error and not a crash.

    Attributes:
        ram_bytes: bytes in memory.
        file_bytes: bytes in the file.
    """

    def __init__(self, *, ram_limit_bytes: int, folder: Path) -> None:
        self.ram_bytes = 0
        self.file_bytes = 0
        self._ram_limit_bytes = ram_limit_bytes
        self._folder = folder
        self._trees: dict[Hashable, Any] = {}
        self._file: IO[bytes] | None = None
        self._segment = torch.zeros(0, dtype=torch.uint8)

    def put(self, number: Hashable, tree: Any) -> None:
        """Store a copy of a tree of tensors, in place of the one with the same number.

        Raises:
            CalibrationError: it fits neither into memory nor onto the disk.
        """
        leaves, spec = pytree.tree_flatten(tree)
        known = pytree.tree_leaves(self._trees.get(number, ()))
        known = [*known, *[None] * (len(leaves) - len(known))]
        kept = [self._copy(leaf, room) for leaf, room in zip(leaves, known, strict=False)]
        self._trees[number] = pytree.tree_unflatten(kept, spec)

    def get(self, number: Hashable, device: torch.device) -> Any:
        """Load a tree onto a device; on the CPU its tensors are the stored ones, not copies."""
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: leaf.to(device, non_blocking=True), self._trees[number]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trees.clear()
        self._segment = torch.zeros(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()

    def _copy(self, leaf: Any, room: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fits = (
            isinstance(room, torch.Tensor)
            and room.shape == leaf.shape
            and room.dtype == leaf.dtype
            and room.stride() == torch.empty_like(leaf, device="meta").stride()
        )
        return (room if fits else self._allocate(leaf)).copy_(leaf)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate with the shape and strides of `like`: results may round by their strides."""
        shaped = torch.empty_like(like, device="meta")
        size_bytes = shaped.numel() * shaped.element_size()
        if self.ram_bytes + size_bytes <= self._ram_limit_bytes:
            self.ram_bytes += size_bytes
            return torch.empty_like(shaped, device="cpu")
        self.file_bytes += size_bytes
        return (
            self._allocate_mapped(size_bytes)
            .view(shaped.dtype)
            .as_strided(shaped.shape, shaped.stride())
        )

    def _allocate_mapped(self, size_bytes: int) -> torch.Tensor:
        aligned_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if aligned_bytes > len(self._segment):
            self._segment = self._map_segment(max(aligned_bytes, _SEGMENT_BYTES))
        found, self._segment = self._segment[:size_bytes], self._segment[aligned_bytes:]
        return found

    def _map_segment(self, size_bytes: int) -> torch.Tensor:
        size_bytes = -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 -- kept open
            offset = os.fstat(self._file.fileno()).st_size
            os.posix_fallocate(self._file.fileno(), offset, size_bytes)
            mapped = mmap.mmap(self._file.fileno(), size_bytes, offset=offset)
        except OSError as error:
            raise CalibrationError(
                f"{self._folder}: no space for more than {format_gib(self.file_bytes)} of hidden "
                f"states: {error.strerror}",
                hint="use fewer --samples, a shorter --seq-len, a larger --memory, or another disk",
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)
