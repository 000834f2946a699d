"""The hidden states between two layers: on the GPU or in memory up to limits, else in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from fp8calib.errors import CalibrationError
from fp8calib.text import format_gib


class HiddenStateStore:
    """Stores trees of tensors by key, such as a number; a context manager.

    Files have no name: they are gone however the process ends. Their disk space is allocated before
    they are mapped, so that a full disk is an error and not a crash.

    Attributes:
        gpu_bytes: bytes on the GPU.
        ram_bytes: bytes in memory.
        file_bytes: bytes in files.
    """

    def __init__(self, *, ram_limit_bytes: int, folder: Path, gpu_limit_bytes: int = 0) -> None:
        self.gpu_bytes = 0
        self.ram_bytes = 0
        self.file_bytes = 0
        self._gpu_limit_bytes = gpu_limit_bytes
        self._ram_limit_bytes = ram_limit_bytes
        self._folder = folder
        self._trees: dict[Hashable, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trees.clear()

    def get(self, number: Hashable, device: torch.device) -> Any:
        """Load a tree onto a device; tensors that are there are the stored ones, not copies."""
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
        is_gpu = leaf.device.type != "cpu"
        if is_gpu and self.gpu_bytes + size_bytes <= self._gpu_limit_bytes:
            self.gpu_bytes += size_bytes
            return torch.empty_like(like, device=leaf.device).copy_(leaf)
        if self.ram_bytes + size_bytes <= self._ram_limit_bytes:
            self.ram_bytes += size_bytes
            return torch.empty_like(like, device="cpu").copy_(leaf)
        self.file_bytes += size_bytes
        return self._map(like).copy_(leaf)

    def _map(self, like: torch.Tensor) -> torch.Tensor:
        """Map a tensor with the shape, dtype and strides of another into a file of its own."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, like.numel() * like.element_size())
                mapped = torch.from_file(file.name, True, like.numel(), dtype=like.dtype)
        except OSError as error:
            raise CalibrationError(
                f"{self._folder}: no space for more than {format_gib(self.file_bytes)} of hidden "
                f"states: {error.strerror}",
                hint="use fewer --samples, a shorter --seq-len, a larger --memory, or another disk",
            ) from error
        return mapped.as_strided(like.shape, like.stride())
