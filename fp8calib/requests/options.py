"""What an option is: a field of a request, from which the command line and Python take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """What the name, the type and the default of a field do not say.

    It stands in the annotation of the field: `Annotated[bool, Option("--force", help="...")]`.
    """

    flags: str = ""
    """As the command line spells it, other spellings behind it; empty: a positional argument."""
    metavar: str | None = None
    help: str = ""
    """For `--help` and `help()`."""
    least: int | None = None
    """The smallest number."""
    most: int | None = None
    """The largest number."""
    parser: Callable[[str], Any] | None = None
    """Reads a value that is no plain number, text or path; raises UsageError."""
    is_layout: bool = False
    """Whether it only chooses what a terminal shows: JSON and the function of Python give all."""
