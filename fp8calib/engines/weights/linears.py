"""The linears of a checkpoint, in the groups that engines join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8calib.checkpoint.header import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A linear of the model, with the tensors that the checkpoint stores for it."""

    module: str
    """Its path in the checkpoint."""
    shape: tuple[int, int]
    """[out, in], by the model's config where the model is known."""
    tensors: Mapping[str, TensorEntry]
    """By the last part of their names."""

    @property
    def projection(self) -> str:
        """The last part of its path."""
        return self.module.rpartition(".")[2]

    def name(self, suffix: str) -> str:
        """Name one of its tensors."""
        return f"{self.module}.{suffix}"


class GroupKind(StrEnum):
    """What an engine makes of a group."""

    LINEAR = "linear"
    EXPERTS = "experts"
    HEAD = "head"
    """The output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearGroup:
    """Linears that an engine joins: a linear, fused projections, or the experts of a layer."""

    path: str
    """The engine's module, by the checkpoint's path: `model.layers.0.self_attn.qkv_proj`."""
    kind: GroupKind
    members: tuple[StoredLinear, ...]
    state: str
    """How the engine's class creates it, as `CreatedLinear.state` says; empty where that is not
    known, and `stored` where no map of classes is asked."""
    listed: str = ""
    """What the lists of a config call it; empty for the path."""

    @property
    def is_by_config(self) -> bool:
        """Whether the engine's class creates it by the quantization config."""
        return self.state in ("config", "joined")
