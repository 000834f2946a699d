"""The hidden states between two layers: in memory up to a limit, beyond it in a mapped file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Hashable
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch.utils import _pytree as pytree

from fp8calib.errors import CalibrationError
from fp8calib.text import format_gib

_ALIGNMENT = 64
_SEGMENT_BYTES = 64 * 2**20  # a process may have some 65,000 mappings


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
        """The mapped bytes that hold no tensor yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trees.clear()
        self._segment = torch.zeros(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()

    def get(self, number: Hashable, device: torch.device) -> Any:
        """Load a tree onto a device; on the CPU its tensors are the stored ones, not copies."""
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: leaf.to(device, non_blocking=True), self._trees[number]
        )

    def put(self, number: Hashable, tree: Any) -> None:
        """Store a copy of a tree of tensors, in place of the one with the same number.

        Raises:
            CalibrationError: it fits neither into memory nor onto the disk.
        """
        leaves, spec = pytree.tree_flatten(tree)
        rooms = pytree.tree_leaves(self._trees.get(number, ()))
        kept = [self._copy(leaf, room) for leaf, room in zip_longest(leaves, rooms[: len(leaves)])]
        self._trees[number] = pytree.tree_unflatten(kept, spec)

    def _copy(self, leaf: Any, room: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # the same strides too: results may round by them
        like = torch.empty_like(leaf, device="meta")
        layout = like.shape, like.dtype, like.stride()
        if isinstance(room, torch.Tensor) and (room.shape, room.dtype, room.stride()) == layout:
            return room.copy_(leaf)
        size_bytes = like.numel() * like.element_size()
        if self.ram_bytes + size_bytes <= self._ram_limit_bytes:
            self.ram_bytes += size_bytes
            return torch.empty_like(like, device="cpu").copy_(leaf)
        self.file_bytes += size_bytes
        aligned_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if aligned_bytes > len(self._segment):
            self._segment = self._map(max(aligned_bytes, _SEGMENT_BYTES))
        mapped, self._segment = self._segment[:size_bytes], self._segment[aligned_bytes:]
        return mapped.view(like.dtype).as_strided(like.shape, like.stride()).copy_(leaf)

    def _map(self, size_bytes: int) -> torch.Tensor:
        """Map new bytes of the file, as many or some more: uint8."""
        page = mmap.ALLOCATIONGRANULARITY
        size_bytes = -(-size_bytes // page) * page
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 -- kept open
            number = self._file.fileno()
            offset = os.fstat(number).st_size
            os.posix_fallocate(number, offset, size_bytes)
            mapped = mmap.mmap(number, size_bytes, offset=offset)
        except OSError as error:
            raise CalibrationError(
                f"{self._folder}: no space for more than {format_gib(self.file_bytes)} of hidden "
                f"states: {error.strerror}",
                hint="use fewer --samples, a shorter --seq-len, a larger --memory, or another disk",
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)
