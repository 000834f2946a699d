"""SHA-256 of the files of a run: the model, the text, and the scales that were read or written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.json_files import is_result
from fp8calib.checkpoint.locations import HUB_FILES
from fp8calib.data.specs import parse_spec
from fp8calib.errors import ModelError

_TEXTS = ("README.md", "LICEN[CS]E*", "NOTICE*", "*.md")
"""Files of a model that no figure depends on."""
_NUM_THREADS = 4
"""One hashes some 2 GB a second."""


def hash_run(
    model: Path | None, specs: Iterable[str], scales: Mapping[str, Path]
) -> dict[str, Any]:
    """Hash the model, the files of `--data`, and files and folders of scales by their names.

    `model` is the folder of the unquantized model, None for one in memory. Files that are linked to
    each other are hashed once.

    Returns:
        `model`, `data`, and `scales` by their names: of each file `name`, `size_bytes`, `sha256`.
    """
    try:
        weights = [] if model is None else _list_files(model)
        texts = [
            file for spec in specs for path in parse_spec(spec).files for file in _list_files(path)
        ]
        by_name = {name: _list_files(place) for name, place in scales.items()}
        every = [*weights, *texts, *(path for files in by_name.values() for path in files)]
        statuses = {path: path.stat() for path in every}
        by_inode = {(status.st_dev, status.st_ino): path for path, status in statuses.items()}
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash") as pool:
            digests = dict(zip(by_inode, pool.map(_hash, by_inode.values()), strict=True))
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error
    hashes = {
        path: {
            "name": path.name,
            "size_bytes": status.st_size,
            "sha256": digests[status.st_dev, status.st_ino],
        }
        for path, status in statuses.items()
    }
    return {
        "model": [hashes[path] for path in weights],
        "data": [hashes[path] for path in texts],
        "scales": {name: [hashes[path] for path in files] for name, files in by_name.items()},
    }


def _list_files(place: Path) -> list[Path]:
    """List a file itself, or the weights, config, tokenizer and scales of a folder."""
    if place.is_file():
        return [place]
    return [
        path
        for path in sorted(place.iterdir())
        if path.is_file()
        and any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, "*.npz"))
        and not any(fnmatch(path.name, pattern) for pattern in _TEXTS)
        and not is_result(path)
    ]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
