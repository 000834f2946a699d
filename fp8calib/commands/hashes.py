"""SHA-256 of the files of a run: the model, the text, and the scales that were read or written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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


class FileHasher(ThreadPoolExecutor):
    """Hashes the files of a run in threads; those that are linked to each other once.

    `model` is the folder of the unquantized model, None for one in memory. It is hashed at once
    where it runs on a GPU; a CPU has other work to do.
    """

    def __init__(self, model: Path | None, *, at_once: bool) -> None:
        super().__init__(_NUM_THREADS, thread_name_prefix="hash")
        self._running: dict[tuple[int, int], Future[str]] = {}
        self._model = model
        if model is not None and at_once:
            self._start(model)

    def __exit__(self, *_error: object) -> None:
        self.shutdown(cancel_futures=True)

    def _start(self, place: Path) -> list[tuple[Path, Future[str]]]:
        """Hash a file itself, or the weights, config, tokenizer and scales of a folder."""
        paths = [place] if place.is_file() else filter(_counts, sorted(place.iterdir()))
        started = []
        for path in paths:
            status = path.stat()
            key = status.st_dev, status.st_ino
            if key not in self._running:
                self._running[key] = self.submit(_hash, path)
            started.append((path, self._running[key]))
        return started

    def hash_run(self, specs: Iterable[str], scales: Mapping[str, Path]) -> RunHashes:
        """Hash the model, the files of `--data`, and files and folders of scales by their names."""
        weights = [] if self._model is None else self._start(self._model)
        texts = [
            each for spec in specs for path in parse_spec(spec).files for each in self._start(path)
        ]
        started = {name: self._start(place) for name, place in scales.items()}
        return RunHashes(
            model=_describe(weights),
            data=_describe(texts),
            scales={name: _describe(files) for name, files in started.items()},
        )


def _describe(files: Iterable[tuple[Path, Future[str]]]) -> tuple[FileHash, ...]:
    return tuple(
        FileHash(name=path.name, size_bytes=path.stat().st_size, sha256=digest.result())
        for path, digest in files
    )


def _counts(path: Path) -> bool:
    is_wanted = any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, "*.npz"))
    is_text = any(fnmatch(path.name, pattern) for pattern in _TEXTS)
    return path.is_file() and is_wanted and not is_text and not is_result(path)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
