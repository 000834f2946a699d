"""An output folder that a later run can continue to fill after an interruption.

A run works in `DIR.partial`. Success renames it to `DIR`. An error removes it, unless only the
renaming failed. After an interruption it stays if something is saved in it; if the process is
killed, it always stays. A lock prevents two runs from using the folder at the same time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from fp8calib.checkpoint.atomic import (
    check_output,
    choose_staging_parent,
    explained,
    name_kept_staging,
    opened_target,
    put_in_place,
    write_file_atomic,
)
from fp8calib.checkpoint.folder_lock import FolderLock
from fp8calib.errors import RESUMABLE, ExportError, Fp8CalibError, UsageError

PROGRESS_NAME = "fp8calib-partial.json"
"""A file with a JSON object: `tag`, which identifies the run for a later one, and the progress
that the run itself records. It is removed when the output is complete."""


@contextmanager
def resumable_folder(
    path: Path,
    *,
    owned: frozenset[str],
    tag: str,
    resume: bool,
    force: bool = False,
    inputs: Collection[Path] = (),
    is_shared: bool = False,
    on_old: Callable[[Path], object] = lambda _: None,
    kept_after: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
) -> Iterator[Path]:
    """Give a temporary folder as `output_folder` does; after `kept_after` it stays.

    With `resume` it is that of an interrupted run of the same `tag`, if there is one. `on_old` is
    called with it before anything in it is changed. `is_shared` lets other processes of this run
    lock it too. If it must be inside `path` (a mount point, the working directory), it is named
    like other temporary folders, which later runs do not count as contents.
    """
    check_output(path, owned, force, inputs=inputs)
    with opened_target(path) as target, ExitStack() as locked:
        with explained(path):
            parent = choose_staging_parent(target)
            is_inside = parent == target
            name = name_kept_staging(target) if is_inside else f"{target.name}.partial"
            staging = parent / name
            lock = locked.enter_context(closing(_open_staging(staging, tag, resume, on_old)))
        if is_shared:
            lock.share()
        is_kept = False
        try:
            with explained(path, staging):
                yield staging
                is_kept = True  # until it is renamed, a later run can still continue
                check_output(path, owned, force, inputs=inputs)  # again: hours may have passed
                put_in_place(staging, target)
                is_kept = False
                remove_progress_file(target)
        except kept_after as error:
            is_kept = is_kept or _is_kept(staging, error, is_shared)
            raise
        except Fp8CalibError as error:
            if is_kept:
                where = f"the output is kept in {staging}: fix the cause, then use --resume"
                error.hint = f"{error.hint}; {where}" if error.hint else where
            raise
        finally:
            if not is_kept:
                shutil.rmtree(staging, ignore_errors=True)


def _open_staging(
    staging: Path, tag: str, resume: bool, on_old: Callable[[Path], object]
) -> FolderLock:
    """Continue in a folder, or make it, and lock it."""
    try:
        if staging.exists():
            with closing(FolderLock(staging)) as lock:
                lock.acquire()
                _check_old(staging, tag, resume)
                on_old(staging)
                if not resume:
                    shutil.rmtree(staging)
        try:
            staging.mkdir(exist_ok=True)
        except FileNotFoundError as error:  # the parent, such as /proc, can hold no folders
            raise UsageError(
                f"{staging}: cannot be created: {error.strerror}",
                hint="name another output folder",
            ) from error
        with ExitStack() as failed:
            lock = failed.enter_context(closing(FolderLock(staging)))
            lock.acquire()
            if _read_tag(staging / PROGRESS_NAME) is None:
                write_file_atomic(staging / PROGRESS_NAME, json.dumps({"tag": tag}).encode())
            failed.pop_all()
            return lock
    except (FileNotFoundError, ExportError) as error:
        if staging.exists():
            raise
        raise UsageError(
            f"{staging}: another run was using this folder, and has just ended",
            hint="run the command again",
        ) from error


def _check_old(staging: Path, tag: str, resume: bool) -> None:
    """Refuse a folder that no interrupted run made, or that this run cannot continue."""
    progress = staging / PROGRESS_NAME
    for path in staging.glob(f".{PROGRESS_NAME}.tmp-*"):  # a run was killed very early
        path.unlink(missing_ok=True)
    if not progress.is_file() and any(staging.iterdir()):
        raise UsageError(
            f"{staging}: the folder is not empty, and was not made by an interrupted run",
            hint="move it away, or name another output folder",
        )
    if resume and _read_tag(progress) not in (None, tag):
        raise UsageError(
            f"{staging}: the interrupted run had another model or other options",
            hint="omit --resume to start again, or use the options of that run",
        )


def _is_kept(staging: Path, error: BaseException, is_shared: bool) -> bool:
    """Whether a later run can continue; if so, an interruption says so."""
    if not isinstance(error, KeyboardInterrupt):
        return True
    # All progress of a run is in safetensors files: shards, codes, or checkpoints. If other
    # processes use the folder, they may still save such files.
    is_kept = is_shared or any(staging.rglob("*.safetensors"))
    if is_kept:
        error.add_note(RESUMABLE)
    return is_kept


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
