"""Imports of large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fp8calib.machine.command_line import spell_command


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
    finally:
        gc.enable()
