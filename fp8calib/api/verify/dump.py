"""The file of --dump: written by one run, read by another with --reference-dump."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.tensor_file import TensorFile, save_tensors
from fp8calib.data.plan import DataPlan
from fp8calib.errors import DataError, ModelError, shorten
from fp8calib.geometry.sites import Role
from fp8calib.verification.report import SCALE_ONE, SERVER
from fp8calib.verification.server.assess import Evidence
from fp8calib.verification.server.faults import StoredFaults
from fp8calib.verification.server.hypotheses import Fault, FaultEffect, Mixup
from fp8calib.verification.verify import VerificationResult


def write_dump(path: Path, verified: VerificationResult) -> None:
    """Write every token's log-probability.

    Raises:
        ExportError: the file cannot be written.
    """
    faults = {
        name: {
            "base": fault.base,
            "layer": fault.layer,
            "is_lost": fault.is_lost,
            "role": fault.role,
            "mixup": fault.mixup,
        }
        for name, fault in verified.faults.items()
    }
    metadata = {"format": "pt", "data": verified.data}
    if faults:
        metadata["faults"] = json.dumps(faults)
    save_tensors(path, dict(verified.logprobs), metadata=metadata)


def is_dump(path: Path) -> bool:
    """Whether a file is one that `write_dump` wrote."""
    try:
        header = read_header(path)
    except ModelError:
        return False
    return "reference" in header.tensors and "data" in header.metadata


def gather_alone(plan: DataPlan, dump: Path | None) -> Evidence:
    """Gather what a server is compared with where nothing runs here: a dump, or nothing.

    Raises:
        ModelError: the dump cannot be read.
        DataError: it is of another text, or damaged.
    """
    logprobs, faults = ({}, {}) if dump is None else _read_dump(dump, plan)
    reference = logprobs.pop("reference", None)
    logprobs.pop(SERVER, None)
    changes = {
        name: (each - reference[: len(each)]).double()
        for name, each in logprobs.items()
        if reference is not None
    }
    effects: dict[str, dict[str, FaultEffect]] = {}
    for name, fault in faults.items():
        if not fault.runs_beside:
            effects.setdefault(fault.base, {})[name] = fault.with_changes(changes.pop(name))
    return Evidence(
        sequences=plan.sequences,
        reference=reference,
        watched=None,
        candidates=changes,
        has_scales=any(name != SCALE_ONE for name in changes),
        faults={name: fault for name, fault in faults.items() if fault.runs_beside},
        layer_faults=StoredFaults(effects=effects, lengths=_scored(plan)) if effects else None,
    )


def _scored(plan: DataPlan) -> list[int]:
    """List the scored tokens of every sequence."""
    return [len(sequence) - 1 for sequence in plan.sequences]


def _read_dump(path: Path, plan: DataPlan) -> tuple[dict[str, torch.Tensor], dict[str, Fault]]:
    """Read the log-probabilities and the faults among them, some of which may be shorter."""
    with TensorFile(path) as file:
        found = {name: file.read(name) for name in file.tensors}
        metadata = file.header.metadata
    if "reference" not in found:
        raise DataError(f"{path}: holds no reference", hint="name a file that verify --dump wrote")
    broken = next((name for name in found if not bool(found[name].isfinite().all())), None)
    if broken is not None:
        raise DataError(
            f"{path}: damaged: {shorten(broken)} has NaN or infinity", hint="write it again"
        )
    faults = _read_faults(path, metadata.get("faults", "{}"))
    lengths = _scored(plan)
    shorter = {name for name, fault in faults.items() if not fault.runs_beside}
    sizes = {tuple(found[name].shape) for name in found if name not in shorter}
    if sizes != {(sum(lengths),)} or metadata.get("data") != plan.fingerprint:
        raise DataError(
            f"{path}: of another text: it has {len(found['reference'])} tokens, this one "
            f"{sum(lengths)}",
            hint="use the same --data, --samples, --seq-len and tokenizer as that run",
        )
    allowed = {(size,) for size in accumulate(lengths)}
    sizes = {tuple(found[name].shape) for name in shorter if name in found}
    if not found.keys() >= faults.keys() or len(sizes) > 1 or not sizes <= allowed:
        raise _damaged(path)
    return found, faults


def _read_faults(path: Path, text: str) -> dict[str, Fault]:
    try:
        return {name: _read_fault(fields) for name, fields in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(path) from error


def _read_fault(fields: dict[str, Any]) -> Fault:
    """Read a fault; in older files, none has a role, and one of all layers is of q."""
    mixup, role = fields.pop("mixup", None), fields.pop("role", None)
    if mixup is None and fields.get("layer") is None:
        role = role or Role.Q
    return Fault(
        **fields,
        role=None if role is None else Role(role),
        mixup=None if mixup is None else Mixup(mixup),
    )


def _damaged(path: Path) -> DataError:
    return DataError(f"{path}: damaged: its faults do not belong to its text")
