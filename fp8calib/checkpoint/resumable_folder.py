"""An output folder that a later run can continue to fill after an interruption.

A run works in `DIR.partial`. Success renames it to `DIR`. An error removes it, unless only the
renaming failed. After an interruption it stays if something is saved in it; if the process is
killed, it always stays. A lock prevents two runs from using the folder at the same time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from fp8calib.checkpoint.atomic import OutputFolder, name_kept_staging, write_file_atomic
from fp8calib.checkpoint.folder_lock import FolderLock
from fp8calib.errors import RESUMABLE, ExportError, Fp8CalibError, UsageError

PROGRESS_NAME = "fp8calib-partial.json"
"""A file with a JSON object: `tag`, which identifies the run for a later one, and the progress
that the run itself records. It is removed when the output is complete."""


@dataclass
class ResumableFolder(OutputFolder):
    """An `OutputFolder` whose temporary folder survives an interruption.

    If the temporary folder must be inside `path` (a mount point, the working directory), it is
    named like other temporary folders, which later runs do not count as contents.
    """

    _: KW_ONLY
    tag: str
    """Identifies what is being written: only a run with the same tag may continue."""
    resume: bool
    """Continue from the temporary folder of an interrupted run."""
    check_resumed: Callable[[Path], object] | None = None
    """Check the temporary folder before the run continues; if it raises, nothing is changed."""
    kept_after: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
    """The exceptions after which the temporary folder is kept."""
    discarded: bool = field(default=False, init=False)
    """Whether the progress of an interrupted run was removed, to start again."""
    _is_complete: bool = field(default=False, init=False)
    _is_shared: bool = field(default=False, init=False)

    def share(self) -> None:
        """Let other processes of this run lock the temporary folder too."""
        self._is_shared = True
        if self._lock is not None:
            self._lock.share()

    def __enter__(self) -> Path:
        try:
            return super().__enter__()
        except BaseException:
            self._unlock()
            raise

    def _make_staging(self, parent: Path) -> Path:
        is_inside = parent == self._target
        name = name_kept_staging(self._target) if is_inside else f"{self._target.name}.partial"
        staging = parent / name
        progress = staging / PROGRESS_NAME
        try:
            if staging.exists():
                self._lock_folder(staging)
                self._check_old(staging)
                if not self.resume:
                    self.discarded = any(path.name != PROGRESS_NAME for path in staging.iterdir())
                    shutil.rmtree(staging)
            try:
                staging.mkdir(exist_ok=True)
            except FileNotFoundError as error:  # the parent, such as /proc, can hold no folders
                raise UsageError(
                    f"{staging}: cannot be created: {error.strerror}",
                    hint="name another output folder",
                ) from error
            self._lock_folder(staging)
            if _read_tag(progress) is None:
                write_file_atomic(progress, json.dumps({"tag": self.tag}).encode())
        except (FileNotFoundError, ExportError) as error:
            if staging.exists():
                raise
            raise UsageError(
                f"{staging}: another run was using this folder, and has just ended",
                hint="run the command again",
            ) from error
        return staging

    def _lock_folder(self, staging: Path) -> None:
        """Lock the folder that now has this name; an earlier one may have been removed."""
        self._unlock()
        lock = FolderLock(staging)
        lock.acquire()
        self._lock = lock

    def _check_old(self, staging: Path) -> None:
        """Refuse a folder that no interrupted run made, or that this run cannot continue."""
        progress = staging / PROGRESS_NAME
        for path in staging.glob(f".{PROGRESS_NAME}.tmp-*"):  # a run was killed very early
            path.unlink(missing_ok=True)
        if not progress.is_file() and any(staging.iterdir()):
            raise UsageError(
                f"{staging}: the folder is not empty, and was not made by an interrupted run",
                hint="move it away, or name another output folder",
            )
        if not self.resume:
            return
        if _read_tag(progress) not in (None, self.tag):
            raise UsageError(
                f"{staging}: the interrupted run had another model or other options",
                hint="omit --resume to start again, or use the options of that run",
            )
        if self.check_resumed is not None:
            self.check_resumed(staging)

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        try:
            if isinstance(exc, self.kept_after) and self._is_kept(exc):
                return
            super().__exit__(kind, exc, trace)
        finally:
            self._unlock()

    def _is_kept(self, exc: BaseException) -> bool:
        """Tell whether a later run can continue; if so, add a note to an interruption."""
        if not isinstance(exc, KeyboardInterrupt):
            return True
        # All progress of a run is in safetensors files: shards, codes, or checkpoints. If other
        # processes use the folder, they may still save such files.
        is_kept = self._is_shared or any(self._staging.rglob("*.safetensors"))
        if is_kept:
            exc.add_note(RESUMABLE)
        return is_kept

    def _commit(self) -> None:
        """Rename the folder before its progress file is removed: a later run can still continue."""
        self._is_complete = True
        try:
            super()._commit()
        except Fp8CalibError as error:
            where = f"the output is kept in {self._staging}: fix the cause, then use --resume"
            error.hint = f"{error.hint}; {where}" if error.hint else where
            raise
        self._is_complete = False
        remove_progress_file(self._target)

    def _clean_up(self) -> None:
        if not self._is_complete:
            super()._clean_up()


def remove_progress_file(folder: Path) -> None:
    """Remove the progress file from a complete output folder."""
    (folder / PROGRESS_NAME).unlink(missing_ok=True)


def _read_tag(progress: Path) -> str | None:
    """Read the tag; None if the run died before the progress file was complete."""
    try:
        document = json.loads(progress.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    tag = document.get("tag") if isinstance(document, dict) else None
    return tag if isinstance(tag, str) else None
