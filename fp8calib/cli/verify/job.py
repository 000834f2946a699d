"""The job of `fp8calib verify`: everything decided before the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.verify.settings import VerifySettings
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

if TYPE_CHECKING:  # it imports httpx, which only --server needs
    from fp8calib.cli.verify.server import ServerJob


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
    server: ServerJob | None
    task_job: TaskJob | None
    dtype: str
    dtype_why: str
    warnings: tuple[str, ...]
