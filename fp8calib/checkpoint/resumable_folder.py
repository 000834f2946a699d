"""An output folder that a later run can continue to fill after an interruption.

A run works in `DIR.partial`. Success renames it to `DIR`. An error removes it, unless only the
renaming failed. After an interruption it stays if something is saved in it; if the process is
killed, it always stays. A lock prevents two runs from using the folder at the same time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fp8calib.checkpoint.atomic import (
    check_output,
    explained,
    opened_staging,
    put_in_place,
    remove_entries,
)
from fp8calib.checkpoint.folder_lock import share_lock
from fp8calib.errors import RESUMABLE, Fp8CalibError, UsageError

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
    lock it too.
    """
    check = partial(check_output, path, owned, force, inputs=inputs)
    with opened_staging(path, "{}.partial", check) as (staging, lock):
        _prepare(staging, tag, resume, on_old)
        if is_shared:
            share_lock(lock)
        is_kept = False
        try:
            with explained(path, staging):
                yield staging
                is_kept = True  # until it is renamed, a later run can still continue
                check()  # again: hours may have passed
                put_in_place(staging, path.resolve())
                is_kept = False
                remove_progress_file(path)
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


def _prepare(staging: Path, tag: str, resume: bool, on_old: Callable[[Path], object]) -> None:
    """Continue what an interrupted run left, or begin: refuse a folder that no run made."""
    progress = staging / PROGRESS_NAME
    if any(staging.iterdir()):
        if not progress.is_file():
            raise UsageError(
                f"{staging}: the folder is not empty, and was not made by an interrupted run",
                hint="move it away, or name another output folder",
            )
        if resume and _read_tag(progress) not in (None, tag):
            raise UsageError(
                f"{staging}: the interrupted run had another model or other options",
                hint="omit --resume to start again, or use the options of that run",
            )
        on_old(staging)
        if not resume:
            remove_entries(staging)
    if _read_tag(progress) is None:
        progress.write_text(json.dumps({"tag": tag}))


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
