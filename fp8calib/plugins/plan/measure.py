"""Plans that are run on a text beside the unquantized model, each once, also by later runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.commands.request import Reporter
from fp8calib.data.sequences import DataPlan, batches
from fp8calib.plugins.plan.choices import Choices, Plan, list_uniform
from fp8calib.plugins.plan.inputs import OpenedPlan
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import CandidateResult
from fp8calib.verification.score import AT_ONCE, count_in_rounds, score_in_rounds
from fp8calib.verification.summary import summarize
from fp8calib.verification.token_scores import TokenScores
from fp8calib.verification.verify import Verification, open_scored, plan_verification

MEASURED_NAME = "measured.safetensors"
_TAG = "fp8calib.plan"
_FIELDS = tuple(TokenScores.__slots__)


class Measurements:
    """What was measured, in a file: scores by the text and the plan they belong to."""

    def __init__(self, path: Path, tag: str) -> None:
        self._path, self._tag = path, tag
        self.scores: dict[str, TokenScores] = {}

    def load(self, path: Path) -> bool:
        """Take what an earlier run measured; False where it is of another model or text."""
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(_TAG) == self._tag:
                for name in {key.rpartition("/")[0] for key in file.keys()}:  # noqa: SIM118
                    found = {each: file.get_tensor(f"{name}/{each}") for each in _FIELDS}
                    self.scores[name] = TokenScores(**found)
                return True
        return False

    def add(self, found: Mapping[str, TokenScores]) -> None:
        """Store scores, and write the file again."""
        self.scores |= found
        tensors = {
            f"{name}/{each}": getattr(scores, each).contiguous()
            for name, scores in self.scores.items()
            for each in _FIELDS
        }
        write_file_atomic(self._path, save(tensors, {"format": "pt", _TAG: self._tag}))


class Measure:
    """Runs plans on one text."""

    def __init__(
        self,
        model: StreamedModel,
        choices: Choices,
        measurements: Measurements,
        reporter: Reporter,
        batch_size: int,
        text: DataPlan,
        stage: str,
    ) -> None:
        self._model, self._choices, self._measurements = model, choices, measurements
        self._batches = list(batches(text, batch_size))
        self._prefix = f"{text.fingerprint[:16]}/"
        self._stage, self._reporter = stage, reporter
        self.lengths = text.lengths
        self.passes = 0
        """Forward passes that were run, the unquantized model's too."""

    def count(self, plans: Sequence[Plan]) -> int:
        """Count the passes that plans take which were not run yet."""
        return count_in_rounds(len(self._list_missing(plans)))

    def run(self, plans: Sequence[Plan]) -> list[TokenScores]:
        """Give the scores of plans."""
        missing = self._list_missing(plans)
        candidates = [self._choices.emulate(plan, name) for name, plan in missing.items()]
        if candidates:
            self._run(candidates)
        known = self._measurements.scores
        return [known[self._name(plan)] if plan else self.reference for plan in plans]

    def summarize(self, plans: Sequence[Plan]) -> list[CandidateResult]:
        """Give the figures of plans."""
        return [summarize(found, self.reference, self.lengths) for found in self.run(plans)]

    @cached_property
    def reference(self) -> TokenScores:
        """The scores of the unquantized model."""
        name = f"{self._prefix}reference"
        if name not in self._measurements.scores:
            self._run([Candidate(name="nothing")])
        return self._measurements.scores[name]

    def _run(self, candidates: Sequence[Candidate]) -> None:
        self.passes += count_in_rounds(len(candidates))
        for found in score_in_rounds(
            *(self._model, candidates, self._batches), progress=self._reporter, stage=self._stage
        ):
            reference = {f"{self._prefix}reference": found.reference}
            self._measurements.add({**found.candidates, **reference})

    def _list_missing(self, plans: Sequence[Plan]) -> dict[str, Plan]:
        named = {self._name(plan): plan for plan in plans if plan}
        return {name: named[name] for name in named if name not in self._measurements.scores}

    def _name(self, plan: Plan) -> str:
        """Name a plan by its choices."""
        content = json.dumps(sorted(plan.items())).encode()
        return self._prefix + hashlib.sha256(content).hexdigest()[:24]


@contextmanager
def open_measured_model(
    opened: OpenedPlan, choices: Choices, reporter: Reporter
) -> Iterator[StreamedModel]:
    """Open the model layer by layer, in as much memory as a full round of plans needs."""
    model, first, second = opened.model, opened.search, opened.held_out
    *_, whole = list_uniform(choices.open(model.prepared).units).values()
    moved = {len(first.sequences) + index: row for index, row in second.media.items()}
    texts = (*first.sequences, *second.sequences)
    asked = Verification(
        model=model,
        engine=opened.engines[0],
        numerics=opened.target.numerics,
        candidates=(choices.emulate(whole),) * AT_ONCE,
        plan=replace(first, sequences=texts, media={**first.media, **moved}),
        batch_size=opened.request.batch_size,
    )
    why = "each group is measured from its own layer on"
    mode = plan_verification(asked, Path.cwd(), walks=1, always_streams=why)
    for text in mode.describe():
        reporter.say(text)
    with open_scored(asked, mode, reporter) as scored:
        assert isinstance(scored, StreamedModel)  # noqa: S101 -- always streamed
        choices.open(scored.prepared)
        yield scored
