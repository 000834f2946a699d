"""An output folder that takes long to fill: what an interrupted run had done is kept for the next.

A run works in `DIR.partial`. Success renames it to `DIR`; an error removes it; only an
interruption, or the death of the process, leaves it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from fp8calib.checkpoint.atomic import OutputFolder
from fp8calib.errors import UsageError

MARK_NAME = "fp8calib-partial.json"
"""A file of the run's own in the folder, by which a later run knows it; gone in the end."""


class PartialFolder(OutputFolder):
    """An `OutputFolder` whose temporary folder outlives an interruption.

    Where the temporary folder has to lie inside `path` (a mount point, the working directory), its
    name is that of other temporary folders, which later runs do not count as contents.
    """

    def __init__(
        self,
        path: Path,
        *,
        owned: frozenset[str],
        resume: bool,
        force: bool = False,
        inputs: Collection[Path] = (),
    ) -> None:
        super().__init__(path, owned=owned, force=force, inputs=inputs)
        self._resume = resume

    def _make_staging(self, parent: Path) -> Path:
        staging = self._name_staging(parent)
        if staging.exists():
            _require_own(staging)
            if not self._resume:
                shutil.rmtree(staging)
        staging.mkdir(exist_ok=True)
        mark = staging / MARK_NAME
        if not mark.exists():
            mark.write_text("{}")
        return staging

    def _name_staging(self, parent: Path) -> Path:
        name = self._target.name
        if parent != self._target:
            return parent / f"{name}.partial"
        return parent / f".{name}.tmp-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(exc, KeyboardInterrupt):
            return
        if exc is None:
            (self._staging / MARK_NAME).unlink(missing_ok=True)
        super().__exit__(exc_type, exc, traceback)


def _require_own(folder: Path) -> None:
    if not (folder / MARK_NAME).is_file() and any(folder.iterdir()):
        raise UsageError(
            f"{folder}: holds what no interrupted run left there",
            hint="move it away, or name another output folder",
        )
