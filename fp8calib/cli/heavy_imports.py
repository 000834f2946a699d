"""Import torch and transformers in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Keep the garbage collector from scanning the objects that an import creates.

    They are nearly a million and live until the end, but the collector scans them again and again
    during the import, and once more at exit. Without that, a calibration of one sequence takes
    3.5 s instead of 5.0 s. Nothing changes if torch is imported already.
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
