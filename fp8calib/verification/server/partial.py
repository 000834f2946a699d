"""What a server has scored so far, in a file from which a later run resumes.

Its name identifies the run; every line holds one sequence.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fp8calib.errors import DataError, ExportError
from fp8calib.verification.server.kinds.kind import SequenceScores

_FIELDS = {"logprobs": "<f4", "top_ids": "<i8", "top_logprobs": "<f4"}


class PartialScores:
    """A file of scored sequences; a line that a killed run left incomplete is dropped."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.path = (
            folder / f"fp8calib-server-{hashlib.sha256(tag.encode()).hexdigest()[:12]}.partial"
        )
        self.found: dict[int, SequenceScores] = {}
        """By number of the sequence: what earlier runs and this one have."""
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
            for number, scores in self.found.items():
                self._write(number, scores)
        except OSError as error:
            raise ExportError(
                f"{self.path}: cannot be written: {error.strerror}",
                hint="run the command in a folder that can be written",
            ) from error

    def add(self, number: int, scores: SequenceScores) -> None:
        """Keep the scores of a sequence.

        Raises:
            ExportError: they cannot be written.
        """
        self.found[number] = scores
        try:
            self._write(number, scores)
        except OSError as error:
            raise ExportError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; without any sequence it is removed."""
        if self._stream is not None:
            self._stream.close()
        if not self.found:
            self.remove()

    def remove(self) -> None:
        """Remove the file: the run is finished."""
        self.path.unlink(missing_ok=True)

    def _write(self, number: int, scores: SequenceScores) -> None:
        assert self._stream is not None  # noqa: S101 -- `open` came first
        line: dict[str, Any] = {"sequence": number, "top": scores.top_ids.shape[1]}
        for name, dtype in _FIELDS.items():
            raw = getattr(scores, name).numpy().astype(dtype).tobytes()
            line[name] = base64.b64encode(raw).decode("ascii")
        self._stream.write(f"{json.dumps(line)}\n")
        self._stream.flush()

    def _load(self) -> None:
        for line in self.path.read_bytes().split(b"\n")[:-1]:
            try:
                number, scores = _read_line(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}: damaged", hint="leave out --resume to start again"
                ) from error
            self.found[number] = scores


def _read_line(line: dict[str, Any]) -> tuple[int, SequenceScores]:
    arrays = {
        name: torch.from_numpy(np.frombuffer(base64.b64decode(line[name]), dtype).copy())
        for name, dtype in _FIELDS.items()
    }
    width = int(line["top"])
    rows = len(arrays["logprobs"])
    return int(line["sequence"]), SequenceScores(
        logprobs=arrays["logprobs"],
        top_ids=arrays["top_ids"].reshape(rows, width),
        top_logprobs=arrays["top_logprobs"].reshape(rows, width),
    )
