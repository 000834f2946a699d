"""What a server has answered so far, in files from which a later run resumes.

A file's name identifies what was asked; every line holds the answer about one sequence.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fp8calib.errors import DataError, ExportError, cut_list

_NAME = "fp8calib-server-{}.partial"
SCORES = {"logprobs": "<f4", "top_ids": "<i8", "top_logprobs": "<f4"}
WRITTEN = {"tokens": "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswers:
    """The files of a run; they are removed when it has finished."""

    folder: Path
    resume: bool
    """Whether to begin with what an earlier run left."""
    warn: Callable[[str], None]
    """Told where an earlier run left nothing to begin with."""
    paths: list[Path] = field(default_factory=list)

    def open(
        self, tag: str, dtypes: Mapping[str, str], sizes: Sequence[Mapping[str, int]]
    ) -> PartialAnswers:
        """Open the file of what `tag` identifies; it holds arrays of these dtypes.

        `sizes` are their elements for every sequence.

        Raises:
            DataError: what an earlier run left cannot be read.
            ExportError: the file cannot be written.
        """
        name = _NAME.format(hashlib.sha256(tag.encode()).hexdigest()[:12])
        if self.resume and not self.paths and not (self.folder / name).exists():
            self._warn_of_nothing()
        opened = PartialAnswers(self.folder / name, dtypes, sizes)
        opened.open(resume=self.resume)
        self.paths.append(opened.path)
        return opened

    def _warn_of_nothing(self) -> None:
        others = cut_list(sorted(path.name for path in self.folder.glob(_NAME.format("*"))))
        left = f"{others} is about another text, server or --server-logprobs" if others else ""
        self.warn(
            f"--resume: no answers of this server about this text are in {self.folder}, so the "
            f"run starts anew{'; ' if left else ''}{left}"
        )

    @property
    def has_answers(self) -> bool:
        """Whether a later run could resume."""
        return any(path.exists() for path in self.paths)

    def remove(self) -> None:
        """Remove the files."""
        for path in self.paths:
            path.unlink(missing_ok=True)


class PartialAnswers:
    """A file of answers; a line that a killed run left incomplete is dropped."""

    def __init__(
        self, path: Path, dtypes: Mapping[str, str], sizes: Sequence[Mapping[str, int]]
    ) -> None:
        self.path = path
        self._dtypes = dtypes
        self._sizes = dict(enumerate(sizes))
        self.found: dict[int, Mapping[str, torch.Tensor]] = {}
        """1-D arrays by number of the sequence: what earlier runs and this one have."""
        self._stream: IO[str] | None = None

    def open(self, *, resume: bool) -> None:
        """Open the file, with what an earlier run left if `resume`.

        Raises:
            DataError: what it left cannot be read.
            ExportError: the file cannot be written.
        """
        if resume and self.path.exists():
            self._load()
        try:
            self._stream = self.path.open("w", encoding="ascii")
            for number, arrays in self.found.items():
                self._write(number, arrays)
        except OSError as error:
            raise ExportError(
                f"{self.path}: cannot be written: {error.strerror}",
                hint="run the command in a folder that can be written",
            ) from error

    def add(self, number: int, arrays: Mapping[str, torch.Tensor]) -> None:
        """Keep the answer about a sequence.

        Raises:
            ExportError: it cannot be written.
        """
        self.found[number] = arrays
        try:
            self._write(number, arrays)
        except OSError as error:
            raise ExportError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; without any sequence it is removed."""
        if self._stream is not None:
            self._stream.close()
        if not self.found:
            self.path.unlink(missing_ok=True)

    def _write(self, number: int, arrays: Mapping[str, torch.Tensor]) -> None:
        assert self._stream is not None  # noqa: S101 -- `open` came first
        line: dict[str, Any] = {"sequence": number}
        for name, dtype in self._dtypes.items():
            raw = arrays[name].numpy().astype(dtype).tobytes()
            line[name] = base64.b64encode(raw).decode("ascii")
        self._stream.write(f"{json.dumps(line)}\n")
        self._stream.flush()

    def _load(self) -> None:
        try:
            for text in self.path.read_bytes().split(b"\n")[:-1]:
                line = json.loads(text)
                number = int(line["sequence"])
                arrays = {
                    name: torch.from_numpy(
                        np.frombuffer(base64.b64decode(line[name]), dtype).copy()
                    )
                    for name, dtype in self._dtypes.items()
                }
                if {name: len(each) for name, each in arrays.items()} != self._sizes[number]:
                    raise ValueError(number)
                self.found[number] = arrays
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path}: damaged", hint="leave out --resume to start again"
            ) from error
