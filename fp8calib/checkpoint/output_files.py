"""Write several output files that appear together or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fp8calib.checkpoint.disk import explain_os_error
from fp8calib.errors import ExportError, UsageError


@contextmanager
def output_files(paths: Collection[Path]) -> Iterator[Mapping[Path, Path]]:
    """Give a temporary path for each file, and rename all of them on success.

    After an exception, the temporary files are removed and no file is renamed.

    Raises:
        ExportError: a folder cannot be written, or a file name is not allowed.
    """
    with _temporary_paths(paths) as temporary:
        yield temporary
        for path, place in temporary.items():
            try:
                os.replace(place, path.resolve())  # noqa: PTH105 -- both are paths of files
            except OSError as error:
                raise explain_os_error(error, path) from error


def probe_output_files(paths: Collection[Path]) -> None:
    """Create every file, empty, and remove it again, to fail now rather than hours later.

    Raises:
        UsageError: a folder cannot be written, or a file name is not allowed.
    """
    try:
        with _temporary_paths(paths):
            pass
    except ExportError as error:
        raise UsageError(error.message, hint="name another file") from error


@contextmanager
def _temporary_paths(paths: Collection[Path]) -> Iterator[Mapping[Path, Path]]:
    """Give a path that can be written in a temporary folder beside each file."""
    temporary: dict[Path, Path] = {}
    with ExitStack() as folders:
        for path in paths:
            target = path.resolve()
            try:
                folder = TemporaryDirectory(
                    prefix=f".{target.name[:64]}.tmp-",
                    dir=target.parent,
                    ignore_cleanup_errors=True,
                )
                temporary[path] = Path(folders.enter_context(folder)) / target.name
                temporary[path].touch()
                temporary[path].unlink()
            except OSError as error:
                raise explain_os_error(error, path) from error
        yield temporary
