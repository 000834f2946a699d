"""The error that every reader raises."""

from __future__ import annotations

from pathlib import Path

from fp8calib.errors import ModelError


def refusal(path: Path, fault: str, *, hint: str = "") -> ModelError:
    """Make the error that names a file and its fault."""
    return ModelError(f"{path}: {fault}", hint=hint)
