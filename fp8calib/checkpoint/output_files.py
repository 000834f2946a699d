"""Several output files that appear together or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType

from fp8calib.checkpoint.atomic import explain_os_error
from fp8calib.errors import ExportError, UsageError


class OutputFiles:
    """Gives a place for each file; what is written there is moved to its path in the end.

    After an error, or an interruption, nothing is moved and nothing stays.
    """

    def __init__(self, paths: Collection[Path]) -> None:
        self._paths = tuple(paths)
        self._places: dict[Path, Path] = {}

    def probe(self) -> None:
        """Make every file, empty, in its place and remove it: hours later this must not fail.

        Raises:
            UsageError: a folder cannot be written, or a name not be had.
        """
        try:
            for path, place in self.__enter__().items():
                try:
                    place.touch()
                except OSError as error:
                    raise explain_os_error(error, path) from error
        except ExportError as error:
            raise UsageError(error.message, hint="name another file") from error
        finally:
            self._remove()
            self._places.clear()

    def __enter__(self) -> Mapping[Path, Path]:
        """Make the places, each beside its path.

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
            self._places[path] = folder / target.name
        return self._places

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Move every file where all were written; remove the places."""
        try:
            if kind is None:
                self._move()
        finally:
            self._remove()

    def _move(self) -> None:
        for path, place in self._places.items():
            try:
                os.replace(place, path.resolve())  # noqa: PTH105 -- both are whole paths
            except OSError as error:
                raise explain_os_error(error, path) from error

    def _remove(self) -> None:
        for place in self._places.values():
            with suppress(OSError):
                place.unlink(missing_ok=True)
            with suppress(OSError):
                place.parent.rmdir()
