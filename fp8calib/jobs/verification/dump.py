"""The file of --dump: written by one run, read by another with --reference-dump."""

from __future__ import annotations

from pathlib import Path

import torch

from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.tensor_file import TensorFile, save_tensors
from fp8calib.data.sequences import DataPlan
from fp8calib.errors import DataError, ModelError, shorten
from fp8calib.verification.report import SCALE_ONE, SERVER
from fp8calib.verification.server.assess import ServerEvidence
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


def gather_alone(plan: DataPlan, dump: Path | None) -> ServerEvidence:
    """Gather what a server is compared with where nothing runs here: a dump, or nothing.

    Raises:
        ModelError: the dump cannot be read.
        DataError: it is of another text, or damaged.
    """
    logprobs = {} if dump is None else _read_dump(dump, plan)
    reference = logprobs.pop("reference", None)
    logprobs.pop(SERVER, None)
    changes = {
        name: (each - reference).double()
        for name, each in logprobs.items()
        if reference is not None
    }
    return ServerEvidence(
        sequences=plan.sequences,
        reference=reference,
        watched=None,
        candidates=changes,
        has_scales=any(name != SCALE_ONE for name in changes),
        faults={},
    )


def _read_dump(path: Path, plan: DataPlan) -> dict[str, torch.Tensor]:
    with TensorFile(path) as file:
        found = {name: file.read(name) for name in file.tensors}
        metadata = file.header.metadata
    if "reference" not in found:
        raise DataError(
            f"{path}: holds no reference",
            hint="name a file that `fp8calib verify --dump FILE` wrote",
        )
    broken = next((name for name in found if not bool(found[name].isfinite().all())), None)
    if broken is not None:
        raise DataError(
            f"{path}: damaged: {shorten(broken)} has NaN or infinity", hint="write it again"
        )
    num_scored = sum(length - 1 for length in plan.lengths)
    sizes = {tuple(each.shape) for each in found.values()}
    if sizes != {(num_scored,)} or metadata.get("data") != plan.fingerprint:
        raise DataError(
            f"{path}: of another text: it has {len(found['reference'])} tokens, this one "
            f"{num_scored}",
            hint="use the same --data, --samples, --seq-len and tokenizer as that run",
        )
    return found
