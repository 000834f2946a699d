"""What an engine does with a scale or a part of a checkpoint, and how it is known."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Status(StrEnum):
    """What an engine does with a scale."""

    USED = "used"
    """It multiplies by the number that the file means."""
    DEFAULTED = "defaulted"
    """It finds no scale, or ignores the whole file, and uses 1.0."""
    DROPPED = "dropped"
    """The engine ignores the scale, or does not support the format."""
    MISREAD = "misread"
    """It uses another number than the file means."""
    BAD = "bad"
    """It uses the number that the file means, which is no scale or not what calibration saw."""
    REFUSED = "refused"
    """It does not start."""
    UNKNOWN = "unknown"
    """This cannot be told without the engine."""


Evidence = Literal["run", "loader run", "read"]
"""How it is known what an engine does: it was run, and the results were compared; only the code
that loads scales was run, and the rest was read; or its source was read."""
