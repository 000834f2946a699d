"""What engines do to FP8 weights, as data that needs no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """What becomes of FP8 weights that an engine does not load as they are."""

    REFUSED = "refused"
    """The engine does not start."""
    MISREAD = "misread"
    """It starts, and its answers are wrong."""
    DEFAULTED = "defaulted"
    """It starts, and uses 1.0 for a scale that it does not find."""
    CONDITION = "condition"
    """It serves the checkpoint, under a condition or in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """FP8 weights that an engine does not load as they are; empty fields match everything."""

    effect: Effect
    why: str
    source: str
    """The engine's version and the file that shows it."""
    dialect: str = ""
    """The name of an FP8 dialect."""
    schemes: tuple[str, ...] = ()
    not_mixed: tuple[str, ...] = ()
    """The schemes that are loaded after all under ModelOpt's MIXED_PRECISION."""
    model_types: tuple[str, ...] = ()
    except_model_types: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    """How the paths of the linears end."""
    has_blocks: bool = False
    """Only weights with a scale per block."""
    has_experts: bool = False
    """Only experts."""
    ignore: tuple[str, ...] = ()
    """Values of `quantize --ignore` that leave these linears unquantized."""
    fix: str = ""
