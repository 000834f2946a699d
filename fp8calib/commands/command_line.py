"""The command line of this run, for reports, and the imports that it waits for."""

from __future__ import annotations

import atexit
import gc
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

UNTOLD = frozenset({"--force", "--json", "--resume"})
"""Flags that change nothing of what is written."""
_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


def remember_arguments(arguments: Sequence[str]) -> None:
    """Keep the arguments of the command that starts now."""
    _arguments.set(tuple(arguments))


def spell_command() -> str:
    """Spell the command that is running; empty if a Python program calls its parts."""
    arguments = _arguments.get()
    return shlex.join(["fp8calib", *arguments]) if arguments else ""


def cut_path(word: str) -> str:
    """Keep the last component of a path, alone or as the value of an option.

    An id of the Hub (`org/name`) stays, unless there is a folder `org` here.
    """
    option, sign, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    path = Path(value)
    is_path = path.is_absolute() or path.parent.exists()
    return f"{option}{sign}{(is_path and path.name) or value}"


@contextmanager
def slow_imports() -> Iterator[None]:
    """Keep the garbage collector from scanning the objects that an import creates.

    There are nearly a million of them, and they live until the end. The collector would scan them
    many times during the import and once more at exit. Without that, a calibration of one sequence
    takes 3.5 s instead of 5.0 s. Nothing changes if torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        if spell_command():  # the objects of a Python program are not ours to keep
            gc.freeze()
            atexit.register(_unfreeze)
    finally:
        gc.enable()


def _unfreeze() -> None:
    """Let the exit free Triton's objects: nanobind (Triton 3.9) reports frozen ones as leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()
