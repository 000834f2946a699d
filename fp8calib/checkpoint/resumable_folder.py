"""An output folder that takes long to fill: what an interrupted run had done is kept for the next.

A run works in `DIR.partial`. Success renames it to `DIR`; an error removes it, unless it hinders
that renaming; an interruption, or the death of the process, leaves it. Two runs never work in one
folder at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from fp8calib.checkpoint.atomic import OutputFolder, write_file_atomic
from fp8calib.checkpoint.folder_lock import FolderLock
from fp8calib.errors import ExportError, Fp8CalibError, UsageError

PROGRESS_NAME = "fp8calib-partial.json"
"""A JSON object by which a later run knows the folder: `tag`, and what the run itself notes.
Gone in the end."""


class ResumableFolder(OutputFolder):
    """An `OutputFolder` whose temporary folder outlives an interruption.

    `tag` says what is being written: only a run of the same tag may go on with it.

    Where the temporary folder has to lie inside `path` (a mount point, the working directory), its
    name is that of other temporary folders, which later runs do not count as contents.
    """

    def __init__(
        self,
        path: Path,
        *,
        owned: frozenset[str],
        tag: str,
        resume: bool,
        force: bool = False,
        inputs: Collection[Path] = (),
        check_resumed: Callable[[Path], object] | None = None,
        kept_after: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    ) -> None:
        """Take what only this kind of run has.

        Args:
            path: see `OutputFolder`.
            owned: see `OutputFolder`.
            tag: what is being written.
            resume: go on with what an interrupted run has left.
            force: see `OutputFolder`.
            inputs: see `OutputFolder`.
            check_resumed: looks at what is to be gone on with; what it raises changes nothing.
            kept_after: the exceptions that leave the temporary folder.
        """
        super().__init__(path, owned=owned, force=force, inputs=inputs)
        self._check_resumed = check_resumed
        self._kept_after = kept_after
        self._tag = tag
        self._resume = resume
        self._lock: FolderLock | None = None
        self._is_complete = False
        self.discarded = False
        """Whether something that an interrupted run had kept was removed to begin anew."""

    def share(self) -> None:
        """Let other processes of this run work in the temporary folder too."""
        if self._lock is not None:
            self._lock.share()

    def __enter__(self) -> Path:
        try:
            return super().__enter__()
        except BaseException:
            self._let_go()
            raise

    def _make_staging(self, parent: Path) -> Path:
        staging = self._name_staging(parent)
        try:
            if staging.exists():
                self._hold(staging)
                self._check_old(staging)
                if not self._resume:
                    self.discarded = any(path.name != PROGRESS_NAME for path in staging.iterdir())
                    shutil.rmtree(staging)
            staging.mkdir(exist_ok=True)
            self._hold(staging)
            mark = staging / PROGRESS_NAME
            if not mark.exists() or _read_tag(mark) is None:
                write_file_atomic(mark, json.dumps({"tag": self._tag}).encode())
        except (FileNotFoundError, ExportError) as error:
            if staging.exists():
                raise
            raise UsageError(
                f"{staging}: another run was at work there, and has just come to its end",
                hint="run the command again",
            ) from error
        return staging

    def _hold(self, staging: Path) -> None:
        """Keep other runs out of the folder, whichever of that name is there now."""
        self._let_go()
        lock = FolderLock(staging)
        lock.take()
        self._lock = lock

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _check_old(self, staging: Path) -> None:
        """Refuse what is not ours to remove, or not this run's to go on with."""
        mark = staging / PROGRESS_NAME
        if not mark.is_file() and any(staging.iterdir()):
            raise UsageError(
                f"{staging}: holds what no interrupted run left there",
                hint="move it away, or name another output folder",
            )
        if self._resume and mark.is_file() and _read_tag(mark) not in (None, self._tag):
            raise UsageError(
                f"{staging}: the interrupted run had another model or other options",
                hint="leave out --resume to start anew, or repeat its options",
            )
        if self._resume and self._check_resumed is not None:
            self._check_resumed(staging)

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
        try:
            if isinstance(exc, self._kept_after):
                return
            super().__exit__(exc_type, exc, traceback)
        finally:
            self._let_go()

    def _commit(self) -> None:
        """Rename it, the mark still in it: without one, nobody could go on after this moment."""
        self._is_complete = True
        try:
            super()._commit()
        except Fp8CalibError as error:
            where = f"everything waits in {self._staging}: mend that, then use --resume"
            error.hint = f"{error.hint}; {where}" if error.hint else where
            raise
        self._is_complete = False
        remove_progress_file(self._target)

    def _clean_up(self) -> None:
        if not self._is_complete:
            super()._clean_up()


def remove_progress_file(folder: Path) -> None:
    """Remove the mark from a finished folder whose run was killed at the very end."""
    (folder / PROGRESS_NAME).unlink(missing_ok=True)


def _read_tag(mark: Path) -> str | None:
    """Read whose folder it is; None where the run died before it had said so."""
    try:
        document = json.loads(mark.read_bytes())
    except ValueError:
        return None
    tag = document.get("tag") if isinstance(document, dict) else None
    return tag if isinstance(tag, str) else None
