"""SHA-256 of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """A file, by what is in it."""

    name: str
    size_bytes: int
    sha256: str


def hash_files(
    paths: Iterable[Path], known: dict[tuple[int, int], FileHash]
) -> tuple[FileHash, ...]:
    """Hash files but for those in `known`, by device and inode, and add them to it."""
    hashes = []
    for path in paths:
        status = path.stat()
        key = (status.st_dev, status.st_ino)
        if key not in known:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known[key] = FileHash(name="", size_bytes=status.st_size, sha256=digest)
        hashes.append(replace(known[key], name=path.name))
    return tuple(hashes)
