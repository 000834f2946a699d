"""SHA-256 of the files of a run: the model, the text, and the scales that were read or written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from fp8calib.checkpoint.json_files import is_result
from fp8calib.checkpoint.locations import HUB_FILES
from fp8calib.data.specs import parse_spec
from fp8calib.model.geometry import Frozen

_TEXTS = ("README.md", "LICEN[CS]E*", "NOTICE*", "*.md")
"""Files of a model that no figure depends on."""
_NUM_THREADS = 4
"""One hashes some 2 GB a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """A file, by what is in it."""

    name: str
    size_bytes: int
    sha256: str


class RunHashes(Frozen):
    """The files of a run with weights, config, tokenizer, text or scales."""

    model: tuple[FileHash, ...]
    """Files of the unquantized model; empty for a model in memory."""
    data: tuple[FileHash, ...]
    """The files of text among `--data`."""
    scales: Mapping[str, tuple[FileHash, ...]]
    """By candidate of `verify`, or by the file or folder that `calibrate` wrote."""


def hash_run(model: Path | None, specs: Iterable[str], scales: Mapping[str, Path]) -> RunHashes:
    """Hash the model, the files of `--data`, and files and folders of scales by their names.

    `model` is the folder of the unquantized model, None for one in memory. Files that are linked to
    each other are hashed once.
    """
    weights = [] if model is None else _list_files(model)
    texts = [
        each for spec in specs for path in parse_spec(spec).files for each in _list_files(path)
    ]
    by_name = {name: _list_files(place) for name, place in scales.items()}
    every = [*weights, *texts, *(path for files in by_name.values() for path in files)]
    status = {path: path.stat() for path in every}
    inodes = {path: (found.st_dev, found.st_ino) for path, found in status.items()}
    different = dict(zip(inodes.values(), inodes, strict=True))
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash") as pool:
        hashes = dict(zip(different, pool.map(_hash, different.values()), strict=True))

    def describe(files: Iterable[Path]) -> tuple[FileHash, ...]:
        return tuple(
            FileHash(name=path.name, size_bytes=status[path].st_size, sha256=hashes[inodes[path]])
            for path in files
        )

    return RunHashes(
        model=describe(weights),
        data=describe(texts),
        scales={name: describe(files) for name, files in by_name.items()},
    )


def _list_files(place: Path) -> list[Path]:
    """List a file itself, or the weights, config, tokenizer and scales of a folder."""
    if place.is_file():
        return [place]
    return [
        path
        for path in sorted(place.iterdir())
        if any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, "*.npz"))
        and not any(fnmatch(path.name, pattern) for pattern in _TEXTS)
        and path.is_file()
        and not is_result(path)
    ]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
