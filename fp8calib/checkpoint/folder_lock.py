"""A lock on a folder, so that two runs never work in it; it ends with the process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fp8calib.errors import UsageError

_TIMEOUT_S = 10.0
"""After the launcher of a run is killed, its processes need a moment to end."""
_POLL_S = 0.1


class FolderLock:
    """Locks a folder, if its file system supports locks.

    The folder itself is locked, by flock: a file beside it, as filelock makes, would stay after a
    kill, and one in it would become part of the output. filelock has no shared locks of this kind.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._folder = folder

    def acquire(self) -> None:
        """Lock the folder exclusively, waiting up to ten seconds.

        Raises:
            UsageError: another process holds it.
        """
        until = time.monotonic() + _TIMEOUT_S
        while not self.acquire_now(if_unknown=True):
            if time.monotonic() > until:
                raise UsageError(
                    f"{self._folder}: another run is using this folder",
                    hint="wait until it ends, stop it, or name another output folder",
                )
            time.sleep(_POLL_S)

    def acquire_now(self, *, if_unknown: bool, operation: int = fcntl.LOCK_EX) -> bool:
        """Lock the folder if no process holds it; `if_unknown` if the file system has no locks."""
        try:
            fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the file system does not support locks
            return if_unknown
        return True

    def share(self) -> None:
        """Downgrade to a shared lock, so that other processes of the run can lock it too."""
        self.acquire_now(if_unknown=True, operation=fcntl.LOCK_SH)

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._descriptor)


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Share the lock on a folder with the process that acquired it, if the folder exists."""
    if not folder.is_dir():
        yield
        return
    with closing(FolderLock(folder)) as lock:
        lock.share()
        yield
