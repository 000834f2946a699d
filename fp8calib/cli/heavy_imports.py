"""Importing torch and transformers in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Keep the garbage collector from searching what an import creates.

    Nearly a million objects that live until the end: the collector walks them again and again
    while they are made, and once more when Python exits. Leaving them out takes a calibration of
    one sequence from 5.0 s to 3.5 s. Nothing changes where torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
