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
    UNKNOWN = "unknown"
    """Most likely it stops; only its own loader can tell."""


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


class Opened(StrEnum):
    """The files of a folder that an engine opens."""

    INDEXED = "those that the index names, or all without one"
    SINGLE = "model.safetensors, or those that the index names"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an engine does with something that it does not load as it is."""

    effect: Effect
    what: str
    """In words, to follow the name of what is concerned."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRules:
    """What an engine does with parameters that no tensor fills, or one of another shape."""

    absent: Outcome
    misfit: Outcome
    absent_vector: Outcome | None = None
    """Of norms and others outside of linears, embeddings and experts, in a checkpoint without a
    quantization config; None where it is the same."""
    takes_rows: bool = False
    """An embedding or output layer may have more or fewer rows than the config says."""
    narrows_experts: bool = False
    """A smaller tensor of an expert fills a part of the parameter."""
    opened: Opened = Opened.INDEXED
    doubts_names: bool = False
    """Its loader looks for tensors by the names of its own class: what becomes of another name is
    not known."""
    bare_types: tuple[str, ...] = ()
    """Model types whose tensors it also finds without the first part of their names."""
    skipped_experts: tuple[str, ...] = ()
    """Model types for which it leaves out experts under other names without an error."""
    tied_types: tuple[str, ...] = ()
    """Model types whose output layer it always makes of the embedding."""
