"""Write several output files that appear together or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from fp8calib.checkpoint.atomic import explain_os_error
from fp8calib.errors import ExportError, UsageError


class OutputFiles:
    """A context manager that gives a temporary path for each file, and renames all on success.

    After an exception, the temporary files are removed and no file is renamed.
    """

    def __init__(self, paths: Collection[Path]) -> None:
        self._paths = tuple(paths)
        self._temporary: dict[Path, Path] = {}

    def probe(self) -> None:
        """Create every file, empty, and remove it again, to fail now rather than hours later.

        Raises:
            UsageError: a folder cannot be written, or a file name is not allowed.
        """
        try:
            for path, temporary in self.__enter__().items():
                try:
                    temporary.touch()
                except OSError as error:
                    raise explain_os_error(error, path) from error
        except ExportError as error:
            raise UsageError(error.message, hint="name another file") from error
        finally:
            self._remove()
            self._temporary.clear()

    def __enter__(self) -> Mapping[Path, Path]:
        """Create a temporary folder beside each path.

        Raises:
            ExportError: a folder cannot be written.
        """
        for path in self._paths:
            target = path.resolve()
            try:
                folder = Path(mkdtemp(prefix=f".{target.name[:64]}.tmp-", dir=target.parent))
            except OSError as error:
                self._remove()
                raise explain_os_error(error, path) from error
            self._temporary[path] = folder / target.name
        return self._temporary

    def __exit__(self, kind: object, *_: object) -> None:
        """Rename all files after success; remove what is temporary."""
        try:
            if kind is None:
                self._move()
        finally:
            self._remove()

    def _move(self) -> None:
        for path, temporary in self._temporary.items():
            try:
                os.replace(temporary, path.resolve())  # noqa: PTH105 -- both are paths of files
            except OSError as error:
                raise explain_os_error(error, path) from error

    def _remove(self) -> None:
        for temporary in self._temporary.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            with suppress(OSError):
                temporary.parent.rmdir()
