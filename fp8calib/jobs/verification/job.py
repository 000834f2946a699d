"""The job of a verification: everything decided before the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8calib.data.plan import DataPlan
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.gpus import Gpu
from fp8calib.engines.numerics import Numerics
from fp8calib.fp8.formats import Fp8Format
from fp8calib.fp8.schemes import Scheme
from fp8calib.jobs.models import RunModel
from fp8calib.machine.progress import Progress
from fp8calib.model.load import LoadedModel
from fp8calib.scales.rules import Rule
from fp8calib.scales.scale_table import ScaleTable
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import Candidate, OpenedCandidate, Target
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.server.assess import ServerAnswers
from fp8calib.verification.tasks.task_files import Tasks

AskServer = Callable[[DataPlan, LoadedModel | None, Progress], tuple[DataPlan, ServerAnswers]]
"""Lets a running server score the text, or one that the model writes; gives the text with it. The
model is None where it is not in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """Servers to ask, and how."""

    url: str
    model: str | None = None
    kind: str | None = None
    """None: recognised."""
    num_top: int = 1
    concurrency: int = 4
    timeout_s: float = 600.0
    is_decoded: bool = False
    """Whether the server also writes text, which it then scores as prompts."""
    is_sampled: bool = False
    """Whether the unquantized model writes the text."""
    reference: str | None = None
    """The URL of a server of the unquantized model."""
    reference_model: str | None = None
    tokenizer: Any = None
    """None: that in the model's folder."""
    say: Callable[[str], None]
    """Gets notes on the connection while it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to compare, and how; the names of the caller are resolved."""

    scales: tuple[str | CalibrationStats, ...]
    """Paths as given, or statistics in memory."""
    engine: Engine
    numerics: Numerics
    others: tuple[tuple[Engine, Numerics], ...] = ()
    """The engines that are compared with it."""
    scheme: Scheme | None
    rules: tuple[Rule, ...]
    """`auto` is alone."""
    by_head: bool = True
    """Whether `auto` may choose a scale for each head."""
    fmt: Fp8Format
    cache_types: Collection[str] = ()
    """Types of the KV cache to compare, beside FP8 with scales."""
    plain_caches: Collection[int] = ()
    """The layers whose KV cache stays in 16 bits."""
    has_all_types: bool = False
    """Whether all were asked for: one that does not fit the model is left out with a note."""
    gpu: Gpu | None = None
    """The one that serves; None: any."""
    kv_memory: float | None = None
    """Bytes for the KV cache."""
    gate: Gate | None
    is_strict: bool = False
    """Whether a warning of the gate is a failure."""
    sensitivity: bool
    batch_size: int
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    with_faults: bool = False
    """Whether faults of a server are candidates too."""
    writes_text: bool = False
    """Whether the model writes the text."""
    scores_decoding: bool = False
    """Whether text is also scored as it is served."""
    measures_noise: bool = False
    """Whether the unquantized model is compared with itself."""
    with_histograms: bool = False
    """Whether the report gets the histograms of the statistics."""
    scratch: Path
    """The folder of hidden states that do not fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskJob:
    """Tasks to run, and the tokenizer for their texts."""

    tasks: Tasks
    tokenizer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob(RunModel):
    """A model, its candidates and the text, opened before a weight is loaded."""

    options: VerifyOptions
    target: Target
    opened: tuple[OpenedCandidate, ...]
    others: tuple[VerifyJob, ...] = ()
    """The same for each engine that is compared with that of the options."""
    plan: DataPlan
    server: AskServer | None = None
    make_candidates: Callable[[LoadedModel, Target], Sequence[Candidate]] | None = None
    """Makes the candidates, instead of those of the options."""
    make_text_scaled: Callable[[LoadedModel, Target], Mapping[str, Candidate]] | None = None
    """Makes those of them that were calibrated on media again, with the scales of the text."""
    tables: Mapping[str, ScaleTable] = field(default_factory=dict)
    """Of candidates that `make_candidates` makes, by name: their KV scales, which a cache type with
    global scales takes too."""
    task_job: TaskJob | None
    refused: Collection[str]
    """The candidates that the engine cannot load."""
    warnings: tuple[str, ...]
