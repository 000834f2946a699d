"""A lock on a folder, so that two runs never work in it; it ends with the process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8calib.errors import UsageError

_TIMEOUT_S = 10.0
"""After the launcher of a run is killed, its processes need a moment to end."""
_POLL_S = 0.1


class FolderLock:
    """Locks a folder, if its file system supports locks."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._folder = folder

    def acquire(self) -> None:
        """Lock the folder exclusively, waiting up to ten seconds.

        Raises:
            UsageError: another process holds it.
        """
        until = time.monotonic() + _TIMEOUT_S
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() > until:
                self.release()
                raise UsageError(
                    f"{self._folder}: another run is using this folder",
                    hint="wait until it ends, stop it, or name another output folder",
                )
            time.sleep(_POLL_S)

    def acquire_now(self, *, if_unknown: bool) -> bool:
        """Lock the folder if no process holds it; `if_unknown` if the file system has no locks."""
        return self._try(fcntl.LOCK_EX, if_unknown=if_unknown)

    def share(self) -> None:
        """Downgrade to a shared lock, so that other processes of the run can lock it too."""
        self._try(fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlock the folder."""
        os.close(self._descriptor)

    def _try(self, operation: int, *, if_unknown: bool = True) -> bool:
        try:
            fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the file system does not support locks
            return if_unknown
        return True


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Share the lock on a folder with the process that acquired it, if the folder exists."""
    if not folder.is_dir():
        yield
        return
    lock = FolderLock(folder)
    lock.share()
    try:
        yield
    finally:
        lock.release()
