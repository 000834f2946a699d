"""A server beside a dump or an unquantized server: nothing is emulated here."""

from __future__ import annotations

from pathlib import Path

import torch

from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.locations import require_path
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.data.sequences import DataPlan
from fp8calib.errors import DataError, UsageError, shorten
from fp8calib.plugins.server.assess import ServerEvidence
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import SERVER
from fp8calib.verification.report import SCALE_ONE, Decision, ReferenceResult, VerifyReport
from fp8calib.verification.summary import compute_ppl
from fp8calib.verification.verify import Verification


def check_dump(request: ServerRequest) -> None:
    """Refuse a dump that cannot be read."""
    if request.reference_dump is None:
        return
    dump = Path(request.reference_dump)
    require_path(dump, option="--reference-dump")
    read_header(dump)  # before the server is asked
    if request.sampled:
        raise UsageError(
            "--sampled: a dump has other text than what the model would write here",
            hint="leave out --sampled, or --reference-dump",
        )


def read_dump(path: Path, plan: DataPlan) -> ServerEvidence:
    """Read what `verify --dump` wrote about the same text."""
    with TensorFile(path) as file:
        found = {name: file.read(name) for name in file.tensors}
        metadata = file.metadata
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
    reference = found.pop("reference")
    found.pop(SERVER, None)
    return ServerEvidence(
        reference=reference,
        watched=None,
        candidates={name: (each - reference).double() for name, each in found.items()},
        has_scales=any(name != SCALE_ONE for name in found),
        faults={},
    )


def report_alone(asked: Verification, reference: torch.Tensor, duration_s: float) -> VerifyReport:
    """Make a report without candidates."""
    plan = asked.plan
    return VerifyReport(
        model=asked.model.name,
        engine=asked.numerics.name,
        engine_version="",
        dtype="unknown",
        device="none",
        data=plan.sources,
        tokens=len(reference),
        sequences=len(plan.sequences),
        seq_len=plan.seq_len,
        duration_s=duration_s,
        reference=ReferenceResult(ppl=compute_ppl(reference)),
        candidates=(),
        layers=(),
        decision=Decision(headline=""),
        warnings=plan.warnings,
    )
