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

# The folder itself is locked, by flock: a file beside it, as filelock makes, would stay after a
# kill, and one in it would become part of the output. filelock has no shared locks of this kind.


@contextmanager
def locked_folder(folder: Path) -> Iterator[int]:
    """Make a folder and lock it, waiting up to ten seconds; give what `share_lock` takes.

    Raises:
        UsageError: another process holds it.
    """
    until = time.monotonic() + _TIMEOUT_S
    while (descriptor := _lock_now(folder)) is None:
        if time.monotonic() > until:
            raise UsageError(
                f"{folder}: another run is using this folder",
                hint="wait until it ends, stop it, or name another output folder",
            )
        time.sleep(_POLL_S)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Share the lock on a folder with the process that locked it, if the folder exists."""
    if not folder.is_dir():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        share_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def share_lock(descriptor: int) -> None:
    """Let other processes of the run lock the folder too."""
    _flock(descriptor, fcntl.LOCK_SH)


def _lock_now(folder: Path) -> int | None:
    folder.mkdir(exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # a run that has just ended removed or renamed it
        return None
    # Once it is locked nobody renames it: it may have been renamed before.
    if _flock(descriptor, fcntl.LOCK_EX) and _is_at(folder, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_at(folder: Path, descriptor: int) -> bool:
    return folder.exists() and os.path.samestat(folder.stat(), os.fstat(descriptor))


def _flock(descriptor: int, operation: int) -> bool:
    """Lock unless another process holds the folder; without locks in the file system, always."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        return True
    return True
