"""The errors a user can meet, each with its kind and its exit code."""

from __future__ import annotations

from typing import ClassVar


class Fp8CalibError(Exception):
    """Say in one message what went wrong, where, and what to do about it.

    Attributes:
        message: what went wrong and where (file, tensor, layer, line).
        hint: what the user can do; empty when there is nothing to add.
    """

    kind: ClassVar[str] = "bug"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


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
