"""The command line of this run, for reports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar

_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


def remember_arguments(arguments: Sequence[str]) -> None:
    """Keep the arguments of the command that starts now."""
    _arguments.set(tuple(arguments))


def spell_command() -> str:
    """Spell the command that is running; empty where a Python program calls its parts."""
    arguments = _arguments.get()
    return shlex.join(["fp8calib", *arguments]) if arguments else ""
