"""What the ranks of a running vLLM answer about their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fp8calib.errors import ServerError
from fp8calib.model.shapes import Role
from fp8calib.plugins.vllm.live_scales import COPIES
from fp8calib.plugins.vllm.loader import list_indices

Slot = tuple[int, Role]
"""A layer and a role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLayer:
    """The attention of one layer on one rank."""

    name: str
    backend: str
    reads: tuple[str, ...]
    """The attributes with scales that the backend's source reads; empty where there is none."""
    cache_dtype: str
    """vLLM's name for it."""
    stored_dtype: str
    """That of the cache's tensor."""
    scales: Mapping[Role, Mapping[str, tuple[float, ...]]]
    """By role and copy, as in `COPIES`; `factor` where the backend keeps one."""

    @property
    def index(self) -> int:
        """The layer's number; -1 where the name has none."""
        return next(iter(list_indices(self.name)), -1)

    def list_read(self, role: Role) -> tuple[str, ...]:
        """List the copies that the backend reads."""
        read = [copy for copy in COPIES if COPIES[copy].format(role) in self.reads]
        return (*read, "factor") if "float" in read and "factor" in self.scales[role] else (*read,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What one rank of a running vLLM says of itself (`LiveScales.fp8calib_read_scales`)."""

    version: str
    device: str
    is_fnuz: bool
    tp_rank: int
    tp: int
    pp_rank: int
    pp: int
    dp: int
    has_graphs: bool
    """Whole forward passes are CUDA graphs, which hold the host's numbers of their capture."""
    layers: tuple[LiveLayer, ...]
    others: tuple[str, ...]
    """Layers with scales that are not the model's, such as those of a drafter."""

    @classmethod
    def parse(cls, answer: Any) -> Self:
        """Read the answer of a worker.

        Raises:
            ServerError: it is none, or that of another version of fp8calib.
        """
        try:
            layers = tuple(_parse_layer(each) for each in answer["layers"])
            return cls(**{**answer, "layers": layers, "others": tuple(answer["others"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            hint = "serve with the same version of fp8calib"
            text = f"a rank's answer cannot be read: {type(error).__name__} {error}"
            raise ServerError(text, hint=hint) from error


def _parse_layer(layer: Mapping[str, Any]) -> LiveLayer:
    scales = {
        Role(role): {copy: tuple(map(float, numbers)) for copy, numbers in copies.items()}
        for role, copies in layer["scales"].items()
    }
    return LiveLayer(**{**layer, "scales": scales, "reads": tuple(layer["reads"])})
