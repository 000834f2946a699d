"""The weights of linears, and their places in tensors that stack experts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp8calib.model.module_paths import name_fused_group

SUFFIX = ".weight"
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The weight of one linear, [rows, columns]: outputs by inputs."""

    module: str
    """The linear's path in the checkpoint; of an expert, that where each has its own tensor."""
    shape: tuple[int, int]
    dtype: str
    """In the spelling of safetensors."""
    stack: str = ""
    """The tensor of the source with the experts of a layer, [experts, ., .]; empty if the matrix is
    a whole tensor."""
    expert: int = 0
    """Its index in the stack."""
    first: int = 0
    """The index in the stack of its first output."""
    is_transposed: bool = False
    """Whether the stack is [experts, in, out]."""

    @property
    def tensor(self) -> str:
        """Name the tensor it is written to."""
        return self.module + SUFFIX

    @property
    def source(self) -> str:
        """Name the tensor it is read from."""
        return self.stack or self.tensor

    @property
    def layer(self) -> str:
        """Name the layer it belongs to; empty outside the numbered layers."""
        found = _LAYER.match(self.module)
        return found.group(1) if found else ""

    @property
    def fused_group(self) -> str:
        """Name the fused projection that engines load it into."""
        return name_fused_group(self.module)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllZeroWeight:
    """A weight that is all zeros, whole or in some rows or blocks."""

    tensor: str
    count: int
    """How many of its scales cover only zeros."""
    total: int

    def __str__(self) -> str:
        return f"{self.tensor}: all zeros in {self.count} of {self.total} of its scales"
