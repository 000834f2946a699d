"""The file of --dump: written by one run, read by another with --reference-dump."""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.errors import ModelError
from fp8calib.verification.verify import VerificationResult


def write_dump(path: Path, verified: VerificationResult) -> None:
    """Write every token's log-probability.

    Raises:
        ExportError: the file cannot be written.
    """
    metadata = {"format": "pt", "data": verified.data}
    save_tensors(path, dict(verified.logprobs), metadata=metadata)


def is_dump(path: Path) -> bool:
    """Whether a file is one that `write_dump` wrote."""
    try:
        header = read_header(path)
    except ModelError:
        return False
    return "reference" in header.tensors and "data" in header.metadata
