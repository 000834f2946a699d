"""The error that every reader raises, and names for its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fp8calib.errors import ModelError, VerificationError, cut_list


def refusal(path: Path, fault: str, *, hint: str = "") -> VerificationError:
    """Make the error that names a file and its fault."""
    return VerificationError(f"{path}: {fault}", hint=hint)


@contextmanager
def reading_errors() -> Iterator[None]:
    """Raise ModelError of a damaged checkpoint file as VerificationError."""
    try:
        yield
    except ModelError as error:
        raise VerificationError(error.message, hint=error.hint) from error


def name_layers(indices: Sequence[int]) -> str:
    """Name layers by their indices: `layer 3`, `layers 1, 2 and 5 more`."""
    return f"layer{'s' if len(indices) > 1 else ''} {cut_list(indices)}"
