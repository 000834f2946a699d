"""Plans that are run on a text beside the unquantized model, each once, also by later runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.data.sequences import DataPlan, batches
from fp8calib.geometry.sites import Role
from fp8calib.jobs.reporter import Reporter
from fp8calib.model.dtype import DTYPES
from fp8calib.plugins.plan.choices import Choices, Plan, list_uniform
from fp8calib.plugins.plan.opened import OpenedPlan
from fp8calib.run.memory_plan import MemoryPlan, Workload, find_limits, plan_memory
from fp8calib.run.streaming.model import StreamedModel, open_streamed
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.probabilities import attending_bytes
from fp8calib.verification.score import AT_ONCE, count_in_rounds, score_in_rounds
from fp8calib.verification.summary import Summary, summarize
from fp8calib.verification.token_scores import TokenScores, scoring_bytes

MEASURED_NAME = "measured.safetensors"
_TAG = "fp8calib.plan"


class Measurements:
    """What was measured, in a file: scores by the text and the plan they belong to."""

    def __init__(self, path: Path, tag: str) -> None:
        self._path, self._tag = path, tag
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, path: Path) -> bool:
        """Take what an earlier run measured; False where it is of another model or text."""
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(_TAG) == self._tag:
                self._tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return True
        return False

    def find(self, name: str) -> TokenScores | None:
        """Find scores by their name."""
        if f"{name}/klds" not in self._tensors:
            return None
        fields = {key: self._tensors[f"{name}/{key}"] for key in TokenScores.__slots__}
        return TokenScores(**fields)

    def add(self, found: Mapping[str, TokenScores]) -> None:
        """Store scores, and write the file again."""
        self._tensors |= {
            f"{name}/{key}": getattr(scores, key).contiguous()
            for name, scores in found.items()
            for key in TokenScores.__slots__
        }
        write_file_atomic(self._path, save(self._tensors, {"format": "pt", _TAG: self._tag}))


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
        return [self._get(self._name(plan)) if plan else self.reference for plan in plans]

    def summarize(self, plans: Sequence[Plan]) -> list[Summary]:
        """Give the figures of plans."""
        return [summarize(found, self.reference, self.lengths) for found in self.run(plans)]

    def list_different(self, plans: Sequence[Plan]) -> list[Plan]:
        """Leave out plans that quantize K and V as an earlier one does."""
        found: list[tuple[Plan, Candidate]] = []
        for plan in plans:
            own = self._choices.emulate(plan)
            if not any(
                all(each.is_same(other.quantizers[site]) for site, each in own.quantizers.items())
                for _, other in found
            ):
                found.append((plan, own))
        return [plan for plan, _ in found]

    @cached_property
    def reference(self) -> TokenScores:
        """The scores of the unquantized model."""
        if self._measurements.find(f"{self._prefix}reference") is None:
            self._run([Candidate(name="nothing")])
        return self._get(f"{self._prefix}reference")

    def _run(self, candidates: Sequence[Candidate]) -> None:
        self.passes += count_in_rounds(len(candidates))
        for found in score_in_rounds(
            *(self._model, candidates, self._batches), progress=self._reporter, stage=self._stage
        ):
            reference = {f"{self._prefix}reference": found.reference}
            self._measurements.add({**found.candidates, **reference})

    def _list_missing(self, plans: Sequence[Plan]) -> dict[str, Plan]:
        named = {self._name(plan): plan for plan in plans if plan}
        return {name: plan for name, plan in named.items() if self._measurements.find(name) is None}

    def _name(self, plan: Plan) -> str:
        """Name a plan by its choices."""
        content = json.dumps(sorted(plan.items())).encode()
        return self._prefix + hashlib.sha256(content).hexdigest()[:24]

    def _get(self, name: str) -> TokenScores:
        found = self._measurements.find(name)
        assert found is not None  # noqa: S101 -- it was run
        return found


@contextmanager
def open_model(opened: OpenedPlan, choices: Choices, reporter: Reporter) -> Iterator[StreamedModel]:
    """Open the model layer by layer, in as much memory as a full round of plans needs.

    Raises:
        UsageError: it does not fit into memory.
        VerificationError: nothing can be quantized.
    """
    model = opened.model
    *_, whole = list_uniform(choices.open(model.prepared.model).units).values()
    mode = _plan_memory(opened, choices.emulate(whole))
    assert mode.streaming is not None  # noqa: S101 -- always streamed
    for text in mode.describe():
        reporter.say(text)
    prepared = model.load(mode, reporter)
    choices.open(prepared.model)
    texts = (*opened.search.sequences, *opened.held_out.sequences)
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *texts])
    with open_streamed(prepared, model.checkpoint, tokens, mode.streaming) as streamed:
        yield streamed


def _plan_memory(opened: OpenedPlan, whole: Candidate) -> MemoryPlan:
    model, size = opened.model, opened.request.batch_size
    texts = (opened.search, opened.held_out)
    chosen = [batch for text in texts for batch in batches(text, size)]
    extra = {}
    if any(site.role is Role.P for site in whole.quantizers):
        heads = max(attention.num_heads for _, attention in model.prepared.geometry.attentions())
        length = max(batch.input_ids.shape[1] for batch in chosen)
        extra["attention in fp32"] = attending_bytes(torch.device(model.device), heads, length)
    dtype = DTYPES[model.dtype]
    return plan_memory(
        Workload(
            source=model.source,
            prepared=model.prepared,
            checkpoint=model.checkpoint,
            dtype=dtype,
            device=model.device,
            batches=chosen,
            scratch=Path.cwd(),
            extra=extra,
            logits_bytes=scoring_bytes(
                torch.device(model.device),
                int(model.source.text_config.vocab_size),
                dtype.itemsize,
                num_tokens=max(batch.input_ids.numel() for batch in chosen),
            ),
            num_models=AT_ONCE + 1,
            changes_weights=bool(whole.weights),
            changes_inputs=any(site.role is Role.INPUT for site in whole.quantizers),
            always_streams="each group is measured from its own layer on",
        ),
        find_limits(model.device, model.memory),
    )
