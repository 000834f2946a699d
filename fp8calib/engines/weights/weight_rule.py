"""What engines do to FP8 weights, as data that needs no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from fp8calib.engines.status import Status
from fp8calib.numerics.schemes import Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """FP8 weights that an engine does not load as they are; empty fields match everything."""

    status: Status
    """USED for a condition."""
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
    granularity: Granularity | None = None
    """Only weights with a scale for each of these."""
    ignore: tuple[str, ...] = ()
    """Values of `quantize --ignore` that leave these linears unquantized."""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRules:
    """What of the tensors beside linears an engine treats in its own way, by model type."""

    bare_types: tuple[str, ...] = ()
    """Types whose tensors it also finds without the first part of their names."""
    skipped_experts: tuple[str, ...] = ()
    """Types for which it leaves out experts under other names without an error."""
    headless_types: tuple[str, ...] = ()
    """Types without an output layer: it takes the embedding, and stops at a stored, untied one."""
    tied_types: tuple[str, ...] = ()
    """Types and classes whose output layer it may make of the embedding."""
    is_silent: bool = False
    """It compares nothing: it raises no error for a parameter that no tensor fills."""
    is_silent_if_quantized: bool = False
    """The same, where the checkpoint has a quantization config."""
