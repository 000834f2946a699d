"""The errors a user can meet, each with its kind and its exit code."""

from __future__ import annotations

from typing import ClassVar

_MAX_MESSAGE = 4000
_MAX_NAME = 200


class Fp8CalibError(Exception):
    """Say in one message what went wrong, where, and what to do about it.

    Attributes:
        message: what went wrong and where (file, tensor, layer, line).
        hint: what the user can do; empty when there is nothing to add.
    """

    kind: ClassVar[str] = "bug"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = fit_line(message)
        self.hint = fit_line(hint)
        super().__init__(self.message)


def shorten(name: str) -> str:
    """Make a name that stands in a file fit for a message: cut, and what cannot be shown escaped.

    Names are as hostile as the file: megabytes long, or full of a terminal's control sequences.
    """
    return _escape(name[:_MAX_NAME])[:_MAX_NAME]


def first_line(error: BaseException) -> str:
    """Give the first line of another library's error, or its type where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def fit_line(text: str) -> str:
    """Keep a message to one line that any terminal prints, and within what anybody reads."""
    if len(text) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return _escape(text)


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class UsageError(Fp8CalibError):
    """The command line asks for something that cannot be."""

    kind = "usage"
    exit_code = 2


class RecipeError(Fp8CalibError):
    """A recipe file is not a recipe, or one of its rules matches nothing."""

    kind = "recipe"
    exit_code = 3


class ModelError(Fp8CalibError):
    """A checkpoint cannot be read, or its architecture is not understood."""

    kind = "model"
    exit_code = 4


class DataError(Fp8CalibError):
    """Calibration data cannot be read or turned into tokens."""

    kind = "data"
    exit_code = 5


class CalibrationError(Fp8CalibError):
    """The forward pass gave something no scale can be made of."""

    kind = "calibration"
    exit_code = 6


class ExportError(Fp8CalibError):
    """Scales cannot be written in the form that was asked for."""

    kind = "export"
    exit_code = 7


class VerificationError(Fp8CalibError):
    """A file or a model did not pass the check it was put to."""

    kind = "verification"
    exit_code = 8
