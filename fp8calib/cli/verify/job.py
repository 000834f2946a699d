"""The settings of `fp8calib verify`, and the job that follows from them before the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.plan import DataPlan
from fp8calib.engines.engine import Engine
from fp8calib.engines.numerics import Numerics
from fp8calib.fp8.formats import Fp8Format
from fp8calib.fp8.schemes import Scheme
from fp8calib.model.load import LoadedModel, ModelSource
from fp8calib.scales.rules import Rule
from fp8calib.verification.candidates import OpenedCandidate, Target
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.tasks.task_files import Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """The command line, unresolved."""

    model: str
    scales: tuple[str, ...]
    data: tuple[str, ...]
    engine: str
    scheme: str | None
    rules: tuple[str, ...]
    sensitivity: bool
    fp8_dtype: str
    samples: int
    seq_len: int | None
    batch_size: int
    pack: bool
    gate: str | None
    report: Path | None
    dump: Path | None
    tasks: tuple[str, ...]
    limit: int | None
    device: str
    dtype: str
    device_map: str | None
    memory: float | None
    """In GiB; None: what is available on the machine."""
    dry_run: bool
    revision: str | None
    trust_remote_code: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """The objects that names on the command line refer to."""

    engine: Engine
    numerics: Numerics
    scheme: Scheme | None
    rules: tuple[Rule, ...]
    fmt: Fp8Format
    gate: Gate | None
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskJob:
    """Tasks to run, and the tokenizer for their texts."""

    tasks: Tasks
    tokenizer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """Everything decided before a weight is loaded."""

    settings: VerifySettings
    options: ResolvedOptions
    source: ModelSource
    checkpoint: Checkpoint
    skeleton: LoadedModel
    """The model without weights."""
    target: Target
    opened: tuple[OpenedCandidate, ...]
    plan: DataPlan
    task_job: TaskJob | None
    dtype: str
    dtype_why: str
    warnings: tuple[str, ...]
