"""What a plug-in compares with the text of a verification, beside the candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fp8calib.data.sequences import DataPlan
from fp8calib.errors import UsageError
from fp8calib.machine.progress import Progress
from fp8calib.model.load import LoadedModel, ModelSource
from fp8calib.model.prepared import PreparedModel
from fp8calib.run.streaming.model import StreamedModel
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.report import VerifyReport
from fp8calib.verification.score import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedText:
    """The scores of a text, and what runs more emulations on it."""

    plan: DataPlan
    candidates: Sequence[Candidate]
    compared: Scores
    model: PreparedModel | StreamedModel
    batch_size: int
    progress: Progress


class Companion(Protocol):
    """Something outside of the model that is compared with the same text: a running server."""

    @property
    def cannot_stream(self) -> UsageError | None:
        """Why the model must be in memory whole; None if it need not be."""

    def connect(self, source: ModelSource, plan: DataPlan, say: Callable[[str], None]) -> DataPlan:
        """Get ready before a weight is loaded; give the plan, with notes among its warnings."""

    def begin(self, plan: DataPlan, model: LoadedModel | None, progress: Progress) -> DataPlan:
        """Ask about the text, or one that `model` writes, and give it; a streamed model is None."""

    def list_emulations(self, candidates: Sequence[Candidate]) -> Mapping[str, Candidate]:
        """List what runs beside the candidates, by name."""

    @property
    def watched(self) -> Sequence[torch.Tensor] | None:
        """The tokens whose log-probabilities by the unquantized model are needed."""

    def compare(self, text: ComparedText) -> None:
        """Compare what was asked with the scores."""

    def complete(
        self, report: VerifyReport, gate: Gate, plan: DataPlan
    ) -> tuple[VerifyReport, Mapping[str, torch.Tensor]]:
        """Complete the report; give log-probabilities for the dump, by name."""
