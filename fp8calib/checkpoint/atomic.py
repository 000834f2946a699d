"""Atomic output: folders and files are written under a temporary name, then renamed."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from fp8calib.checkpoint.disk import explain_os_error, find_existing
from fp8calib.checkpoint.folder_lock import FolderLock
from fp8calib.checkpoint.json_files import is_result
from fp8calib.errors import UsageError

_MOUNTS = Path("/proc/self/mountinfo")
_TOKEN_DIGITS = 8
_MAX_NAME_BYTES = 200  # file systems allow 255; the rest is for the temporary suffix


@contextmanager
def output_folder(
    path: Path, *, owned: frozenset[str], force: bool = False, inputs: Collection[Path] = ()
) -> Iterator[Path]:
    """Give a temporary folder, and rename it to `path` on success.

    The temporary folder is a hidden sibling of `path`. It is inside `path` if the whole folder
    cannot or should not be renamed: it is a mount point (a container's volume) or the working
    directory, or its parent is not writable. In that case, and if `path` holds owned files that the
    run did not write, entries are replaced one by one; after a failure the old ones are restored.

    An `OSError` in the `with` block becomes an `ExportError`; other exceptions are unchanged. After
    any exception, the temporary folder and the parent folders made for it are removed. A process
    that is killed leaves its temporary folder; the next run with the same `path` removes it.
    The arguments are those of `check_output`. What commands printed with `--json` may lie in
    `path`, and stays there.
    """
    check_output(path, owned, force, inputs=inputs)
    with opened_target(path) as target:
        with explained(path):
            staging, lock = _make_staging(target)
        try:
            with explained(path, staging):
                yield staging
                check_output(path, owned, force, inputs=inputs)  # again: hours may have passed
                put_in_place(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            lock.close()


@contextmanager
def opened_target(path: Path) -> Iterator[Path]:
    """Resolve an output folder, make its parents, and remove what killed runs left beside it.

    Parents that are empty at the end are removed.
    """
    target, made_parents = path.resolve(), list[Path]()
    try:
        with explained(path):
            _make_folders(target.parent, made_parents)
            _remove_leftovers(target)
        yield target
    finally:
        _remove_empty(made_parents)


@contextmanager
def explained(path: Path, staging: Path | None = None) -> Iterator[None]:
    """Turn an OSError into an ExportError of `path`, for which `staging` is written."""
    try:
        yield
    except OSError as error:
        needed_bytes = 0 if staging is None else measure_folder(staging)
        raise explain_os_error(error, path, needed_bytes=needed_bytes) from error


def _make_staging(target: Path) -> tuple[Path, FolderLock]:
    """Make a folder and lock it; in between, another run may take it for a leftover."""
    while True:
        staging = choose_staging_parent(target) / _name_temporary(target)
        staging.mkdir()
        with suppress(FileNotFoundError):
            lock = FolderLock(staging)
            if lock.acquire_now(if_unknown=True) and staging.is_dir():
                return staging, lock
            lock.close()


def put_in_place(staging: Path, target: Path) -> None:
    """Rename a complete temporary folder, or its entries, to its final name."""
    new = {entry.name for entry in staging.iterdir()}
    old = {entry.name for entry in target.iterdir()} if target.is_dir() else set()
    replaced = staging.with_name(f"{staging.name}.old")
    if target.is_dir():
        shutil.copymode(target, staging)
    try:
        if staging.parent == target or not old <= new:
            replaced.mkdir()
            away = [(target / name, replaced / name) for name in sorted(old & new)]
            _move_all([*away, *((staging / name, target / name) for name in sorted(new))])
        elif old:
            _move_all([(target, replaced), (staging, target)])
        else:
            staging.rename(target)
    except BaseException:
        _remove_empty([replaced])  # all that was moved there is back
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def check_output(
    path: Path, owned: frozenset[str], force: bool, *, inputs: Collection[Path] = ()
) -> None:
    """Refuse an output folder that `output_folder` would refuse; write nothing.

    The folder and its parents need not exist. `owned` are the names of all entries that the command
    writes; `force` allows replacing them. The output may neither replace nor contain the paths in
    `inputs`, which the command reads.

    Raises:
        UsageError: the folder is not empty, or cannot be created or written.
    """
    try:
        target = path.resolve()
        for source in inputs:
            if source.resolve().is_relative_to(target):
                message = f"{path}: the output would replace {source}, which is an input"
                raise UsageError(message, hint="name another folder")
        if target.exists():
            _check_entries(path, owned, force)
        for folder in (choose_staging_parent(target), *([target] if target.is_dir() else [])):
            _refuse_unwritable(folder, path)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: circular links
        raise UsageError(f"{path}: cannot be used as output folder: {error}") from error


def check_output_file(path: Path, *, force: bool = True) -> None:
    """Refuse a path that `write_file_atomic` could not write; write nothing.

    Without `force`, a file that exists is refused too.

    Raises:
        UsageError: it is a folder or a device, or cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: exists, and is not a regular file", hint="name another file")
        if path.exists() and not force:
            raise UsageError(f"{path}: exists; --force replaces it", hint="use --force, or move it")
        _refuse_unwritable(find_existing(path.resolve().parent), path)
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
    temporary = target.with_name(_name_temporary(target))
    made_parents: list[Path] = []
    try:
        _make_folders(target.parent, made_parents)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise explain_os_error(error, path, needed_bytes=len(data)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        _remove_empty(made_parents)


def _check_entries(path: Path, owned: frozenset[str], force: bool) -> None:
    if not path.is_dir():
        raise UsageError(f"{path}: a file, not a folder", hint="name another folder")
    target = path.resolve()
    temporary = _match_temporary(target)  # of another run, or of a killed one
    names = {entry.name for entry in target.iterdir() if not temporary.fullmatch(entry.name)}
    if not names:
        return
    refuse_unknown_entries(path, {name for name in names - owned if not is_result(target / name)})
    if not force:
        message = f"{path}: the folder is not empty"
        raise UsageError(message, hint="use --force to replace its files, or another folder")


def refuse_unknown_entries(path: Path, names: Collection[str]) -> None:
    """Refuse a folder whose entries `names` would be lost.

    Raises:
        UsageError: `names` is not empty.
    """
    if names:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        message = f"{path}: the folder holds files that this command does not write: {shown}"
        raise UsageError(message, hint="name another folder")


def _refuse_unwritable(folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"{path}: {folder} is not a folder", hint="name another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: {folder} cannot be written", hint="name another path")


def choose_staging_parent(target: Path) -> Path:
    """Choose the parent of the temporary folder: `target`'s parent, or `target` if necessary."""
    parent = find_existing(target.parent)
    if target.is_dir() and (
        Path.cwd().is_relative_to(target)
        or _is_mount_point(target)
        or not os.access(parent, os.W_OK | os.X_OK)
    ):
        return target
    return parent


def _is_mount_point(path: Path) -> bool:
    """Tell whether a path is a mount point, bind mounts (container volumes) included."""
    if path.is_mount():
        return True
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:  # not Linux
        return False
    spelled = str(path).replace("\\", "\\134").replace(" ", "\\040")
    return any(line.split(" ")[4] == spelled for line in lines)


def _make_folders(path: Path, made: list[Path]) -> None:
    """Create a folder and its missing parents; append each to `made`, outermost first."""
    for folder in [folder for folder in (path, *path.parents) if not folder.exists()][::-1]:
        folder.mkdir(exist_ok=True)
        made.append(folder)


def _remove_empty(folders: Collection[Path]) -> None:
    """Remove the folders (innermost last) that exist and are empty."""
    for folder in reversed(list(folders)):
        with suppress(OSError):
            folder.rmdir()


def _name_temporary(target: Path) -> str:
    name = os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])
    return f".{name}.tmp-{secrets.token_hex(_TOKEN_DIGITS // 2)}"


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of `target` that no process has locked.

    A folder stays if its run was killed while it replaced earlier output, which is now beside the
    folder, or if a later run can continue it.
    """
    pattern, kept = _match_temporary(target), name_kept_staging(target)
    parents = [folder for folder in (target.parent, target) if folder.is_dir()]
    for entry in [entry for folder in parents for entry in folder.iterdir()]:
        is_replacing = entry.with_name(f"{entry.name}.old").exists()
        is_temporary = pattern.fullmatch(entry.name) and entry.suffix != ".old"
        if not is_temporary or is_replacing or entry.name == kept or entry.is_symlink():
            continue
        # Another run may be faster, or it is not ours to remove.
        with suppress(OSError), closing(FolderLock(entry)) as lock:
            if lock.acquire_now(if_unknown=False):
                shutil.rmtree(entry, ignore_errors=True)


def name_kept_staging(target: Path) -> str:
    """Name the temporary folder inside `target` of a run that a later one can continue."""
    return f".{target.name}.tmp-{hashlib.sha256(target.name.encode()).hexdigest()[:_TOKEN_DIGITS]}"


def _match_temporary(target: Path) -> re.Pattern[str]:
    """Match the names of temporary folders of `output_folder`."""
    stem = re.escape(_name_temporary(target)[:-_TOKEN_DIGITS])
    return re.compile(rf"{stem}[0-9a-f]{{{_TOKEN_DIGITS}}}(\.old)?")


def _move_all(moves: Collection[tuple[Path, Path]]) -> None:
    """Rename in order; after a failure, undo the renames and raise."""
    done: list[tuple[Path, Path]] = []
    try:
        for source, destination in moves:
            source.rename(destination)
            done.append((source, destination))
    except BaseException:
        for source, destination in reversed(done):
            destination.rename(source)
        raise


def measure_folder(folder: Path) -> int:
    """Add up the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
