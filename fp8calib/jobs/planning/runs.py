"""Plans that are run on a text beside the unquantized model, each once, also by later runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.verification.planning.arrays import Plan
from fp8calib.verification.planning.choices import Group, emulate_plan
from fp8calib.verification.score import count_in_rounds
from fp8calib.verification.text_runs import TextRuns
from fp8calib.verification.token_scores import TokenScores

MEASURED_NAME = "measured.safetensors"
_REFERENCE = "reference"
_TAG = "fp8calib.plan"


class Measurements:
    """What was measured, in a file: tensors by the text and the plan they belong to."""

    def __init__(self, path: Path, tag: str) -> None:
        self._path = path
        self._tag = tag
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self._path.parent

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._tensors

    def load(self, path: Path) -> bool:
        """Take what an earlier run measured; False where it is of another model or text."""
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(_TAG) == self._tag:
                self._tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return True
        return False

    def find(self, prefix: str) -> dict[str, torch.Tensor]:
        """Give what is stored under names that begin so, by the rest of the name."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }

    def add(self, prefix: str, found: Mapping[str, torch.Tensor]) -> None:
        """Store tensors, and write the file again."""
        self._tensors |= {f"{prefix}{name}": each.contiguous() for name, each in found.items()}
        write_file_atomic(self._path, save(self._tensors, {"format": "pt", _TAG: self._tag}))


class Runs:
    """Runs plans on one text (`RunPlans`)."""

    def __init__(
        self,
        runs: TextRuns,
        groups: Sequence[Group],
        measurements: Measurements,
        *,
        text: str,
        stage: str,
    ) -> None:
        """Run plans of `groups`; `text` is the fingerprint of the text."""
        self._runs = runs
        self._groups = groups
        self._measurements = measurements
        self._stage = stage
        self._prefix = f"{text[:16]}/"
        self.lengths = runs.lengths

    def __call__(self, plans: Iterable[Plan]) -> Mapping[Plan, tuple[TokenScores, TokenScores]]:
        """Give the scores of each plan, and those of the unquantized model."""
        asked = {plan: self._name(plan) for plan in plans}
        missing = {
            name: emulate_plan(self._groups, plan)
            for plan, name in asked.items()
            if not self._measurements.find(name)
        }
        if missing:
            self._runs.begin_stage(self._stage, count_in_rounds(len(missing)))
        for found in self._runs.run_rounds(missing):
            pack = _pack(self._prefix + _REFERENCE, found.reference)
            for name, scores in found.candidates.items():
                pack |= _pack(name, scores)
            self._measurements.add("", pack)
        reference = self._read(self._prefix + _REFERENCE) if asked else None
        return {
            plan: (self._read(name), reference)
            for plan, name in asked.items()
            if reference is not None
        }

    def _name(self, plan: Plan) -> str:
        """Name a plan by its choices, whatever the others of its groups are."""
        chosen = [
            [group.name, group.choices[choice].name, group.choices[choice].size_bytes]
            for group, choice in zip(self._groups, plan, strict=True)
            if choice
        ]
        if not chosen:
            return self._prefix + _REFERENCE
        return self._prefix + hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:24]

    def _read(self, name: str) -> TokenScores:
        return TokenScores(**self._measurements.find(f"{name}/"))


def _pack(name: str, scores: TokenScores) -> dict[str, torch.Tensor]:
    return {f"{name}/{field}": getattr(scores, field) for field in TokenScores.__slots__}
