"""Room on a disk, and what the system says where a file cannot be written."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path

from fp8calib.errors import ExportError


def require_free_space(path: Path, size_bytes: int) -> None:
    """Check that the disk of `path` (which need not exist) has room for `size_bytes`.

    Raises:
        ExportError: there is too little room; the message gives the bytes needed and free.
    """
    free_bytes = shutil.disk_usage(find_existing(path.resolve())).free
    if free_bytes < size_bytes:
        needed, free = format_size(size_bytes), format_size(free_bytes)
        message = f"{path}: {needed} are needed and {free} are free on its disk"
        raise ExportError(message, hint="free some space, or use a folder on another disk")


def format_size(size_bytes: int) -> str:
    """Format a number of bytes for people, in powers of 1000."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def explain_os_error(error: OSError, path: Path, *, needed_bytes: int = 0) -> ExportError:
    """Turn a failure to write into an `ExportError`; `needed_bytes` is a lower bound."""
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    message = f"{path}: cannot be written: {reason}{where}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ExportError(message, hint="nothing was written")
    free = ""
    with suppress(OSError):
        free_bytes = shutil.disk_usage(find_existing(path.resolve())).free
        free = f", {format_size(free_bytes)} are free"
    if needed_bytes:
        message += f"; more than {format_size(needed_bytes)} are needed{free}"
    return ExportError(message, hint="free some space, or use a folder on another disk")


def find_existing(path: Path) -> Path:
    """Find the path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
