"""A folder that one run works in: another is told so. The lock ends with the process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8calib.errors import UsageError

_PATIENCE_S = 10.0
"""The processes of a run whose starter was killed need a moment to notice."""
_POLL_S = 0.1


class FolderLock:
    """Holds a folder, as far as its file system knows locks."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._folder = folder

    def take(self) -> None:
        """Hold the folder alone.

        Raises:
            UsageError: another process holds it.
        """
        until = time.monotonic() + _PATIENCE_S
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() > until:
                self.release()
                raise UsageError(
                    f"{self._folder}: another run is at work there",
                    hint="wait for its end, stop it, or name another output folder",
                )
            time.sleep(_POLL_S)

    def share(self) -> None:
        """Let other processes of the same run hold the folder too."""
        self._try(fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go of the folder."""
        os.close(self._descriptor)

    def _try(self, operation: int) -> bool:
        try:
            fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Hold a folder together with the process that has taken it; do nothing where it is not."""
    if not folder.is_dir():
        yield
        return
    lock = FolderLock(folder)
    lock.share()
    try:
        yield
    finally:
        lock.release()
