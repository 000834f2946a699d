"""The hashes of the files of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8calib.results.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHash:
    """A file, by what is in it."""

    name: str
    size_bytes: int
    sha256: str


class RunHashes(Record):
    """The files of a run with weights, config, tokenizer, text or scales."""

    model: tuple[FileHash, ...]
    """Those of the unquantized model; empty for one in memory."""
    data: tuple[FileHash, ...]
    """The files of text among `--data`."""
    scales: Mapping[str, tuple[FileHash, ...]]
    """By candidate of `verify`, or by the file or folder that `calibrate` wrote."""
