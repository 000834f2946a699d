"""The hashes of the files of a run."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.checkpoint.hashes import FileHash
from fp8calib.results.record import Record


class RunHashes(Record):
    """The files of a run with weights, config, tokenizer, text or scales."""

    model: tuple[FileHash, ...]
    """Those of the unquantized model; empty for one in memory."""
    data: tuple[FileHash, ...]
    """The files of text among `--data`."""
    scales: Mapping[str, tuple[FileHash, ...]]
    """By candidate of `verify`, or by the file or folder that `calibrate` wrote."""
