"""The command line of this run, for reports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

_UNTOLD = frozenset({"--force", "--json", "--resume"})
"""Flags that change nothing of what is written."""
_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


def remember_arguments(arguments: Sequence[str]) -> None:
    """Keep the arguments of the command that starts now."""
    _arguments.set(tuple(arguments))


def spell_command() -> str:
    """Spell the command that is running; empty where a Python program calls its parts."""
    arguments = _arguments.get()
    return shlex.join(["fp8calib", *arguments]) if arguments else ""


def publish_command(command: str) -> str:
    """Cut the paths of a command line, and leave out flags without effect on files."""
    return shlex.join(cut_path(word) for word in shlex.split(command) if word not in _UNTOLD)


def cut_path(word: str) -> str:
    """Keep the last component of a path, alone or as `--option=PATH`.

    An id of the Hub (`org/name`) stays, unless there is a folder `org` here.
    """
    option, sign, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    path = Path(value)
    is_path = path.is_absolute() or path.parent.exists()
    return f"{option}{sign}{(is_path and path.name) or value}"
