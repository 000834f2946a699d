"""A checkpoint's FP8 weights, as rules about loading see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fp8calib.fp8.schemes import Granularity
from fp8calib.geometry.module_paths import name_fused_group


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """A linear with an FP8 weight."""

    module: str
    shape: tuple[int, int]
    """[out, in]."""
    scheme: str
    """The name of its scheme, or of the nearest one."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block; None without block scales."""
    granularity: Granularity | None = None
    """What one scale of the weight is for; None where that does not matter."""

    @property
    def fused_group(self) -> str:
        """The fused weight into which engines load it: its path with all projections."""
        return name_fused_group(self.module)

    @property
    def is_expert(self) -> bool:
        """Whether it is an expert, among which a router chooses."""
        return ".experts." in self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """The linears of a checkpoint, as rules about loading see them."""

    dialect: str
    """The name of its FP8 dialect."""
    config: Mapping[str, object]
    """The model's config.json."""
    linears: tuple[QuantizedLinear, ...]
    unquantized: Collection[str]
    """The paths of the linears that are not FP8."""
    is_mixed: bool = False
    """Whether it is ModelOpt's MIXED_PRECISION, for which engines have a separate method."""
