"""Rules on names of tensors beside those of the model's class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRules:
    """How an engine treats parameters beside linears, by model type."""

    bare_types: tuple[str, ...] = ()
    """Types whose tensors it also finds without the first part of their names."""
    headless_types: tuple[str, ...] = ()
    """Types without an output layer: it takes the embedding, and stops at a stored, untied one."""
    untied_types: tuple[str, ...] = ()
    """Types whose output layer may not be tied to the embedding."""
    unties_stored: bool = False
    """It loads a stored `lm_head.weight`, though the config ties it to the embedding."""
    tied_types: tuple[str, ...] = ()
    """Types and classes whose output layer it may make of the embedding."""
    skipped_experts: tuple[str, ...] = ()
    """Types for which it leaves out experts under other names without an error."""
    is_silent: bool = False
    """It compares nothing: it raises no error for a parameter that no tensor fills."""
    is_silent_if_quantized: bool = False
    """The same, where the checkpoint has a quantization config."""
