"""The job of a verification: everything decided before the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fp8calib.data.sequences import DataPlan
from fp8calib.engines.engine import Engine
from fp8calib.engines.numerics import Numerics
from fp8calib.jobs.models import RunModel
from fp8calib.jobs.reporter import Reporter
from fp8calib.model.load import LoadedModel
from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.rules import Rule
from fp8calib.numerics.schemes import Scheme
from fp8calib.requests.verify import VerifyRequest
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import OpenedCandidate, Target
from fp8calib.verification.companion import Companion
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.report import RefusedCandidate
from fp8calib.verification.verify import VerificationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to compare, and how: a request, and what its names stand for."""

    request: VerifyRequest
    scales: tuple[str | CalibrationStats, ...]
    """Paths as given, or statistics in memory."""
    engine: Engine
    numerics: Numerics
    scheme: Scheme | None
    rules: tuple[Rule, ...]
    fmt: Fp8Format
    plain_caches: Collection[int] = ()
    """The layers whose KV cache stays in 16 bits."""
    gate: Gate | None
    measures_noise: bool = False
    """Whether the unquantized model is compared with itself."""
    scratch: Path
    """The folder of hidden states that do not fit into memory."""


class JobCompanion(Companion, Protocol):
    """A companion that may compare without a run of the model."""

    def compare_alone(self, job: VerifyJob, reporter: Reporter) -> VerificationResult | None:
        """Compare without emulating, where that is asked for or all that is possible; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob(RunModel):
    """A model, its candidates and the text, opened before a weight is loaded."""

    options: VerifyOptions
    target: Target
    opened: tuple[OpenedCandidate, ...]
    plan: DataPlan
    companion: JobCompanion | None = None
    """What is compared with the same text."""
    make_candidates: Callable[[LoadedModel, Target], Sequence[Candidate]] | None = None
    """Makes the candidates, instead of those of the options."""
    refused: Collection[str]
    """The candidates that the engine cannot load, or whose KV scales it does not use."""
    left_out: tuple[RefusedCandidate, ...] = ()
    """Those that cannot be read or emulated."""
    warnings: tuple[str, ...]
