"""The error that every reader raises, and lists for its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fp8calib.errors import ModelError, VerificationError, shorten

MAX_LISTED = 8


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


def cut_list(items: Collection[object]) -> str:
    """List the first few of `items`, each fit for a message, and count the others."""
    shown = ", ".join(shorten(str(item)) for item in list(items)[:MAX_LISTED])
    more = len(items) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def name_layers(indices: Sequence[int]) -> str:
    """Name layers by their indices: `layer 3`, `layers 1, 2 and 5 more`."""
    return f"layer{'s' if len(indices) > 1 else ''} {cut_list(indices)}"
