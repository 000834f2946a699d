"""SHA-256 of the files of a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """A file, by what is in it."""

    name: str
    """Relative to the folder."""
    size_bytes: int
    sha256: str


def hash_file(path: Path, name: str = "") -> FileHash:
    """Hash a file; `name` replaces its own."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileHash(name=name or path.name, size_bytes=path.stat().st_size, sha256=digest)


def hash_folder(folder: Path, without: frozenset[str] = frozenset()) -> Iterator[FileHash]:
    """Hash all files below a folder, but for hidden ones and the names `without`."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in without and not name.startswith("."):
            yield hash_file(path, name)
