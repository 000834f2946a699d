"""SHA-256 of the files of a run: the model, the text, and the scales that were read or written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
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


Known = dict[tuple[int, int], FileHash]
"""The hashes of files by device and inode."""


@contextmanager
def hashing(model: Path | None, device: str) -> Iterator[Callable[[], Known]]:
    """Hash the files of a model in threads beside passes on a GPU; give what waits for them.

    On a CPU, whose cores the passes need, nothing is hashed here.
    """
    known: Known = {}
    paths = [] if model is None or device == "cpu" else _list_files(model)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash") as pool:
        running = [pool.submit(hash_files, [path], known) for path in paths]

        def finish() -> Known:
            for each in running:
                each.result()
            return known

        try:
            yield finish
        finally:
            pool.shutdown(cancel_futures=True)


def hash_run(
    model: Path | None,
    specs: Iterable[str],
    scales: Mapping[str, Path],
    known: Known | None = None,
) -> RunHashes:
    """Hash the files of a run, each once, but for those that are `known`.

    Args:
        model: the folder of the unquantized model; None for one in memory.
        specs: values of `--data`.
        scales: files and folders of scales by the names they are known by.
        known: the hashes of some files, and then of all.
    """
    known = {} if known is None else known

    def hash_place(place: Path) -> tuple[FileHash, ...]:
        return hash_files(_list_files(place), known)

    texts = [path for spec in specs for path in parse_spec(spec).files]
    return RunHashes(
        model=() if model is None else hash_place(model),
        data=hash_files(texts, known),
        scales={name: hash_place(place) for name, place in scales.items()},
    )


def _list_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(filter(_counts, place.iterdir()))


def hash_files(paths: Iterable[Path], known: Known) -> tuple[FileHash, ...]:
    """Hash files but for those in `known`, and add them to it."""
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


def _counts(path: Path) -> bool:
    """Whether a file holds weights, config, tokenizer or scales."""
    is_wanted = any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, "*.npz"))
    is_text = any(fnmatch(path.name, pattern) for pattern in _TEXTS)
    return path.is_file() and is_wanted and not is_text and not is_result(path)
