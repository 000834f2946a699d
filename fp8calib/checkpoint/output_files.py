"""Write several output files that appear together or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from fp8calib.checkpoint.disk import explain_os_error
from fp8calib.errors import ExportError, UsageError


@contextmanager
def output_files(paths: Collection[Path]) -> Iterator[Mapping[Path, Path]]:
    """Give a temporary path for each file, and rename all of them on success.

    After an exception, the temporary files are removed and no file is renamed.

    Raises:
        ExportError: a folder cannot be written.
    """
    with _temporary_paths(paths) as temporary:
        yield temporary
        for path, place in temporary.items():
            with _explained(path):
                os.replace(place, path.resolve())  # noqa: PTH105 -- both are paths of files


def probe_output_files(paths: Collection[Path]) -> None:
    """Create every file, empty, and remove it again, to fail now rather than hours later.

    Raises:
        UsageError: a folder cannot be written, or a file name is not allowed.
    """
    try:
        with _temporary_paths(paths) as temporary:
            for path, place in temporary.items():
                with _explained(path):
                    place.touch()
    except ExportError as error:
        raise UsageError(error.message, hint="name another file") from error


@contextmanager
def _temporary_paths(paths: Collection[Path]) -> Iterator[Mapping[Path, Path]]:
    """Give a path in a temporary folder beside each file; remove the folders at the end."""
    temporary: dict[Path, Path] = {}
    try:
        for path in paths:
            target = path.resolve()
            with _explained(path):
                folder = mkdtemp(prefix=f".{target.name[:64]}.tmp-", dir=target.parent)
            temporary[path] = Path(folder) / target.name
        yield temporary
    finally:
        for place in temporary.values():
            with suppress(OSError):
                place.unlink(missing_ok=True)
            with suppress(OSError):
                place.parent.rmdir()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, path) from error
