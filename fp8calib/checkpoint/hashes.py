"""SHA-256 of a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """A file, by what is in it."""

    name: str
    size_bytes: int
    sha256: str


def hash_file(path: Path) -> FileHash:
    """Hash a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileHash(name=path.name, size_bytes=path.stat().st_size, sha256=digest)
