"""What of a checkpoint is FP8, as far as it decides who can load it, and what is said of that."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fp8calib.dialects.fp8.weights import FUSED_NAME
from fp8calib.engines.engine import Effect

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.([^.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFault:
    """What an engine makes of FP8 weights that is not what they mean."""

    engine: str
    effect: Effect
    why: str
    source: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """A linear with an FP8 weight."""

    module: str
    shape: tuple[int, int]
    """[out, in]."""
    scheme: str
    """`fp8-static`, `fp8-dynamic`, `w8a16` or `fp8-block`."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, where scales are of blocks."""

    @property
    def fused_group(self) -> str:
        """Name what engines load it into, together with others."""
        return name_fused_group(self.module)

    @property
    def is_expert(self) -> bool:
        """Tell whether it is one of many that a router chooses from."""
        return ".experts." in self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """The linears of a checkpoint, as far as engines' loading depends on them."""

    dialect: str
    """`compressed-tensors`, `autofp8` (`quant_method: fp8`), `modelopt`, or another method."""
    config: Mapping[str, object]
    """The model's config.json."""
    linears: tuple[QuantizedLinear, ...]
    unquantized: Collection[str]
    """Paths of the linears that are not FP8."""
    is_mixed: bool = False
    """It is ModelOpt's MIXED_PRECISION, for which engines have a method of its own."""


def fault_per_engine(
    sources: Mapping[str, str], effect: Effect, why: str, fix: str
) -> Iterator[WeightFault]:
    """Say the same of several engines, each with the file of its own that says so."""
    for engine, source in sources.items():
        yield WeightFault(engine=engine, effect=effect, why=why, source=source, fix=fix)


def name_fused_group(module: str) -> str:
    """Name what engines load a linear into, together with others."""
    parent, _, projection = module.rpartition(".")
    return f"{parent}.{FUSED_NAME.get(projection, projection)}"


def list_split_groups(quantized: Collection[str], unquantized: Collection[str]) -> list[str]:
    """List the fused groups of which only a part is quantized, by paths of linears."""
    groups = {name_fused_group(module) for module in quantized}
    return sorted({name_fused_group(module) for module in unquantized} & groups)


def list_split_experts(
    quantized: Collection[str], unquantized: Collection[str], *, by_projection: bool = False
) -> list[str]:
    """List the layers' experts of which only a part is quantized, by paths of linears.

    Args:
        quantized: what is quantized.
        unquantized: what is not.
        by_projection: ask of each projection alone, over all experts.
    """
    sides = [
        {found.expand(r"\1.*.\2") if by_projection else found[1] for found in matches if found}
        for matches in (map(_EXPERT.fullmatch, modules) for modules in (quantized, unquantized))
    ]
    return sorted(sides[0] & sides[1])
