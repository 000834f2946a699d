"""Atomic output: folders and files are written under a temporary name, then renamed.

Also the room on a disk, and what the system says where a file cannot be written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fp8calib.checkpoint.json_files import is_result
from fp8calib.errors import RESUMABLE, ExportError, Fp8CalibError, UsageError

PROGRESS_NAME = "fp8calib-partial.json"
"""A file with a JSON object: `tag`, which identifies the run for a later one, and the progress
that the run itself records. It is removed when the output is complete."""
LOCK_TIMEOUT_S = 10.0
"""After the launcher of a run is killed, its processes need a moment to end."""
_REPLACED = ".{}.fp8calib-old"
"""The name of an old output, until the new one is in its place."""
_MAX_NAME_BYTES = 200
"""File systems allow 255; the rest is for what is put around a name."""
_OTHER_DISK_HINT = "free some space, or use a folder on another disk"


@contextmanager
def output_folder(
    path: Path,
    *,
    owned: frozenset[str],
    force: bool = False,
    inputs: Collection[Path] = (),
    tag: str = "",
    resume: bool = False,
    on_old: Callable[[Path], object] = lambda _: None,
    kept_after: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
) -> Iterator[Path]:
    """Give a temporary folder, and rename it to `path` on success.

    Entries of `path` that the run did not write stay: other owned ones, and what commands printed
    with `--json`. An `OSError` in the `with` block becomes an `ExportError`; other exceptions are
    unchanged. After any exception, the temporary folder and the parent folders made for it are
    removed. What a killed process leaves is removed by the next run with the same `path`; until
    then, `path` holds the old output or the new one, or its next run puts the old one back.

    With a `tag`, a later run can continue to fill the temporary folder, which is `DIR.partial`. It
    then also stays if only the renaming failed, and after `kept_after` if something is saved in it.

    Args:
        path: as of `check_output`, like `owned`, `force` and `inputs`.
        owned: names of all entries that the command writes.
        force: replace existing entries.
        inputs: what the command reads.
        tag: identifies the run for a later one; empty for a run that cannot be continued.
        resume: continue an interrupted run of the same `tag`, if there is one.
        on_old: called with the folder of an interrupted run before anything in it is changed.
        kept_after: the exceptions after which the folder stays.
    """
    check_output(path, owned, force, inputs=inputs)
    target = path.resolve()
    staging = _name_beside(target, "{}.partial" if tag else ".{}.fp8calib-tmp")
    old = _name_beside(target, _REPLACED)
    with explained(path), _made(target.parent), _locked(staging):
        if old.exists() and not target.exists():  # a run was killed between two renames
            old.rename(target)
        check_output(path, owned, force, inputs=inputs)  # another run may have ended meanwhile
        shutil.rmtree(old, ignore_errors=True)
        if tag:
            _prepare(staging, tag, resume, force, on_old)
        else:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        is_kept = False
        try:
            with explained(path):
                yield staging
                is_kept = bool(tag)  # until it is renamed, a later run can still continue
                check_output(path, owned, force, inputs=inputs)  # hours may have passed
                _put_in_place(staging, target)
            is_kept = False
            (path / PROGRESS_NAME).unlink(missing_ok=True)
        except BaseException as error:
            if tag and isinstance(error, kept_after) and _has_progress(staging):
                is_kept = True
            if is_kept and isinstance(error, KeyboardInterrupt):
                error.add_note(RESUMABLE)
            elif is_kept and isinstance(error, Fp8CalibError) and "--resume" not in error.hint:
                where = f"the output is kept in {staging}: fix the cause, then use --resume"
                error.hint = f"{error.hint}; {where}" if error.hint else where
            raise
        finally:
            if not is_kept:
                shutil.rmtree(staging, ignore_errors=True)


def _prepare(
    staging: Path, tag: str, resume: bool, force: bool, on_old: Callable[[Path], object]
) -> None:
    """Continue what an interrupted run left, or begin: refuse a folder that no run made."""
    progress = staging / PROGRESS_NAME
    staging.mkdir(exist_ok=True)
    try:
        known = json.loads(progress.read_bytes())["tag"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        known = None  # a new run, or one that died before the file was complete
    if any(staging.iterdir()):
        fault, hint = "", "use the options of that run; to start again, remove the folder"
        if not progress.is_file():
            fault = "the folder is not empty, and was not made by an interrupted run"
            hint = "move it away, or name another output folder"
        elif resume and known not in (None, tag):
            fault = "the interrupted run had another model or other options"
        elif not resume and not force and _has_progress(staging):
            fault = "an interrupted run is kept here"
            hint = "add --resume to continue it; to start again, remove the folder"
        if fault:
            raise UsageError(f"{staging}: {fault}", hint=hint)
        if resume:
            on_old(staging)
        else:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            known = None
    if known is None:
        progress.write_text(json.dumps({"tag": tag}))


def _has_progress(staging: Path) -> bool:
    """Whether a folder holds what a run has finished: shards, codes, or checkpoints."""
    return any(staging.rglob("*.safetensors"))


def remove_unfinished(folder: Path, *, kept: str) -> None:
    """Remove what an interrupted run began to write, but for names that begin with `kept`."""
    for path in folder.iterdir():
        if path.name.startswith((PROGRESS_NAME, kept)):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# --- temporary folders ---------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other run on this machine use a folder meanwhile.

    The file of the lock is in the system's temporary folder: beside the output it would stay after
    a kill, and in it become a part of it.
    """
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"fp8calib-{os.getuid()}-{digest}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout as error:
        raise UsageError(
            f"{folder}: another run is using this folder",
            hint="wait until it ends, stop it, or name another output folder",
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # whoever waits for it makes another one
        lock.release()


def _put_in_place(staging: Path, target: Path) -> None:
    """Rename a complete temporary folder to its final name; what it does not replace stays."""
    replaced = _name_beside(target, _REPLACED)
    if target.is_dir():
        shutil.copymode(target, staging)
        for entry in target.iterdir():
            kept = staging / entry.name
            if not kept.exists() and entry.is_dir():
                shutil.copytree(entry, kept, copy_function=_link)
            elif not kept.exists():
                _link(entry, kept)
        target.rename(replaced)
    try:
        staging.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; remove those that are empty at the end."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            for parent in made:
                parent.rmdir()


def _name_beside(target: Path, name: str) -> Path:
    stem = os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])
    return target.with_name(name.format(stem))


# --- what may be written -------------------------------------------------------------------------


def check_output(
    path: Path, owned: frozenset[str], force: bool, *, inputs: Collection[Path] = ()
) -> None:
    """Refuse an output folder that `output_folder` would refuse; write nothing.

    The folder and its parents need not exist. `owned` are the names of all entries that the command
    writes; `force` allows replacing them. The output may neither replace nor contain the paths in
    `inputs`, which the command reads.

    Raises:
        UsageError: the folder is not empty, or cannot be created, replaced or written.
    """
    faults: list[tuple[str, str]] = []
    """What is wrong, each with a hint."""
    other = "name another folder"
    try:
        target = path.resolve()
        replaced = [each for each in inputs if each.resolve().is_relative_to(target)]
        if replaced:
            faults.append((f"the output would replace {replaced[0]}, which is an input", other))
        if target.exists() and not target.is_dir():
            faults.append(("a file, not a folder", other))
        elif target.exists() and not faults:
            names = {entry.name for entry in path.iterdir()}
            strange = {name for name in names - owned if not is_result(path / name)}
            refuse_unknown_entries(path, strange)
            if names and not force:
                hint = "use --force to replace its files, or another folder"
                faults.append(("the folder is not empty", hint))
            faults += _list_unwritable(target)
        if target.is_mount() or Path.cwd().is_relative_to(target):
            fault = "a mount point or the working directory, which a whole folder cannot replace"
            faults.append((fault, f"name a folder in it, such as {path / 'out'}"))
        faults += _list_unwritable(_find_existing(target.parent))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: circular links
        raise UsageError(f"{path}: cannot be used as output folder: {error}") from error
    for fault, hint in faults:
        raise UsageError(f"{path}: {fault}", hint=hint)


def refuse_unknown_entries(path: Path, names: Collection[str]) -> None:
    """Refuse a folder whose entries `names` would be lost."""
    if names:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        message = f"{path}: the folder holds files that this run does not write: {shown}"
        raise UsageError(message, hint="name another folder")


def _list_unwritable(folder: Path) -> Iterator[tuple[str, str]]:
    if not folder.is_dir():
        yield f"{folder} is not a folder", "name another path"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"{folder} cannot be written", "name another path"


def check_output_file(path: Path, *, force: bool = True) -> None:
    """Refuse a path that `write_file_atomic` could not write; write nothing.

    Without `force`, a file that exists is refused too.
    """
    try:
        faults = [*_list_unwritable(_find_existing(path.resolve().parent))]
        if path.exists() and not path.is_file():
            faults.insert(0, ("exists, and is not a regular file", "name another file"))
        elif path.exists() and not force:
            faults.insert(0, ("exists", "use --force to replace it, or move it"))
        for fault, hint in faults:
            raise UsageError(f"{path}: {fault}", hint=hint)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: circular links
        raise UsageError(f"{path}: cannot be used as output file: {error}") from error


def write_file_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it; missing parents are created.

    Raises:
        UsageError: the path is a folder or a device.
        ExportError: the file cannot be written; an existing file is unchanged.
    """
    check_output_file(path)
    target = path.resolve()
    temporary = _name_beside(target, f".{{}}.tmp-{secrets.token_hex(4)}")
    with explained(path, needed_bytes=len(data)), _made(target.parent):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def list_files(folder: Path) -> tuple[str, ...]:
    """List the files in a folder and below, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return tuple(sorted(path.relative_to(folder).as_posix() for path in files))


# --- disks ---------------------------------------------------------------------------------------


def require_free_space(path: Path, size_bytes: int) -> None:
    """Check that the disk of `path` (which need not exist) has room for `size_bytes`.

    Raises:
        ExportError: there is too little room; the message gives the bytes needed and free.
    """
    free_bytes = shutil.disk_usage(_find_existing(path.resolve())).free
    if free_bytes < size_bytes:
        needed, free = format_size(size_bytes), format_size(free_bytes)
        message = f"{path}: {needed} are needed and {free} are free on its disk"
        raise ExportError(message, hint=_OTHER_DISK_HINT)


def format_size(size_bytes: int) -> str:
    """Format a number of bytes for people, in powers of 1000."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@contextmanager
def explained(path: Path, *, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError into an ExportError of `path`; `needed_bytes` is a lower bound."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        message, hint = f"{path}: cannot be written: {error.strerror or error}{where}", ""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "nothing was written"
        elif needed_bytes:
            message += f"; more than {format_size(needed_bytes)} are needed"
            with suppress(OSError):
                free_bytes = shutil.disk_usage(_find_existing(path.resolve())).free
                message += f", {format_size(free_bytes)} are free"
        raise ExportError(message, hint=hint or _OTHER_DISK_HINT) from error


def _find_existing(path: Path) -> Path:
    """Find the path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
