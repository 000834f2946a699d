"""SHA-256 of the files of a run: the model, the text, and the scales that were read or written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from fp8calib.checkpoint.json_files import is_result
from fp8calib.checkpoint.locations import HUB_FILES
from fp8calib.commands.result import FileHash, RunHashes
from fp8calib.data.specs import parse_spec

_TEXTS = ("README.md", "LICEN[CS]E*", "NOTICE*", "*.md")
"""Files of a model that no figure depends on."""
_NUM_THREADS = 4
"""One hashes some 2 GB a second."""


Digests = Mapping[tuple[int, int], str]
"""SHA-256 (hex) of files by device and inode."""


@contextmanager
def hashing(model: Path | None, device: str) -> Iterator[Callable[[], Digests]]:
    """Hash the files of a model in threads beside passes on a GPU; give what waits for them.

    On a CPU, whose cores the passes need, nothing is hashed here.
    """
    paths = [] if model is None or device == "cpu" else _list_files(model)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash") as pool:
        running = {_identify(path): pool.submit(_hash, path) for path in paths}
        try:
            yield lambda: {key: each.result() for key, each in running.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def hash_run(
    model: Path | None,
    specs: Iterable[str],
    scales: Mapping[str, Path],
    known: Digests | None = None,
) -> RunHashes:
    """Hash the files of a run; those that are linked to each other once.

    Args:
        model: the folder of the unquantized model; None for one in memory.
        specs: values of `--data`.
        scales: files and folders of scales by the names they are known by.
        known: what `hashing` has given.
    """
    known = known or {}
    texts = [path for spec in specs for path in parse_spec(spec).files]
    weights = [] if model is None else _list_files(model)
    places = {name: _list_files(place) for name, place in scales.items()}
    paths = [*weights, *texts, *(path for files in places.values() for path in files)]
    by_inode = {_identify(path): path for path in paths}
    left = {key: path for key, path in by_inode.items() if key not in known}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = dict(zip(left, pool.map(_hash, left.values()), strict=True))
    digests = {**known, **found}

    def describe(files: Iterable[Path]) -> tuple[FileHash, ...]:
        return tuple(
            FileHash(
                name=path.name, size_bytes=path.stat().st_size, sha256=digests[_identify(path)]
            )
            for path in files
        )

    return RunHashes(
        model=describe(weights),
        data=describe(texts),
        scales={name: describe(files) for name, files in places.items()},
    )


def _list_files(place: Path) -> list[Path]:
    """List a file itself, or the weights, config, tokenizer and scales of a folder."""
    if place.is_file():
        return [place]
    return [path for path in sorted(place.iterdir()) if path.is_file() and _counts(path)]


def _counts(path: Path) -> bool:
    is_wanted = any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, "*.npz"))
    is_text = any(fnmatch(path.name, pattern) for pattern in _TEXTS)
    return is_wanted and not is_text and not is_result(path)


def _identify(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
