"""The error that every reader raises, and names for its messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8calib.errors import ModelError, format_ranges


def refusal(path: Path, fault: str, *, hint: str = "") -> ModelError:
    """Make the error that names a file and its fault."""
    return ModelError(f"{path}: {fault}", hint=hint)


def name_layers(indices: Sequence[int]) -> str:
    """Name layers by their indices: `layer 3`, `layers 1, 4-9`."""
    return f"layer{'s' if len(indices) > 1 else ''} {format_ranges(sorted(indices))}"
