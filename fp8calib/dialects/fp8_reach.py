"""How far the FP8 weights of a checkpoint reach, read like the weights themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint


class StoredReach:
    """Gives `Fp8Checkpoint.read_reach` where the checkpoint gives a weight.

    What merges and renames the checkpoint's tensors for a model does the same to these.
    """

    def __init__(self, checkpoint: Fp8Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies."""
        return self._checkpoint.folder

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The checkpoint's tensors by name."""
        return self._checkpoint.tensors

    def read(self, name: str) -> torch.Tensor:
        """Give the reach of every element of an FP8 weight: fp32."""
        return self._checkpoint.read_reach(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Give that of some rows of the leading dimension."""
        return self._checkpoint.read_reach(name, start, stop)

    def shape(self, name: str) -> tuple[int, ...]:
        """Tell the shape of what `read` gives."""
        return self._checkpoint.shape(name)
