"""One text, and what scores candidates on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8calib.data.sequences import Batch
from fp8calib.machine.progress import Progress
from fp8calib.model.prepared import PreparedModel
from fp8calib.run.streaming.model import StreamedModel
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.score import AT_ONCE, Scores, score


class TextRuns:
    """Scores candidates on one text, and beside them the unquantized model."""

    def __init__(
        self,
        model: PreparedModel | StreamedModel,
        batches: Sequence[Batch],
        progress: Progress,
    ) -> None:
        self.batches = batches
        self.lengths = [length for batch in batches for length in batch.scored_lengths]
        """Of each sequence: one more than its tokens that are scored."""
        self.num_tokens = sum(batch.num_tokens for batch in batches)
        self._model = model
        self._progress = progress

    def begin_stage(self, name: str, num_passes: int) -> None:
        """Begin a stage of so many passes, each counted once whatever its layers are."""
        self._progress.stage(name, self.num_tokens * num_passes, unit="tokens")

    def run(self, candidates: Mapping[str, Candidate]) -> Scores:
        """Score candidates together, as a part of a stage."""
        named = [replace(each, name=name) for name, each in candidates.items()]
        return score(self._model, named, self.batches, progress=self._progress)

    def run_rounds(self, candidates: Mapping[str, Candidate]) -> Iterator[Scores]:
        """Score `AT_ONCE` candidates at a time, as a part of a stage."""
        names = list(candidates)
        for start in range(0, len(names), AT_ONCE):
            yield self.run({name: candidates[name] for name in names[start : start + AT_ONCE]})


def fit_in_rounds(passes: float) -> int:
    """Count the candidates that at most so many passes run in rounds."""
    return int(passes) * AT_ONCE // (AT_ONCE + 1)
