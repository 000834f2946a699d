"""What the ranks of a running vLLM answer about their scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from fp8calib.errors import ServerError
from fp8calib.model.geometry import Frozen, Role
from fp8calib.plugins.vllm.live_scales import COPIES
from fp8calib.plugins.vllm.loader import list_indices

Slot = tuple[int, Role]
"""A layer and a role."""


class LiveLayer(Frozen):
    """The attention of one layer on one rank."""

    name: str
    backend: str
    reads: tuple[str, ...]
    """The attributes with scales that the backend's source reads; empty if there is none."""
    cache_dtype: str
    """vLLM's name for it."""
    stored_dtype: str
    """The dtype of the cache's tensor."""
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


class RankAnswer(Frozen):
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
        """Read the answer of a worker."""
        try:
            return cls.model_validate(answer)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise ServerError(
                f"a rank's answer cannot be read: {place}: {first['msg']}",
                hint="serve with the same version of fp8calib",
            ) from error
