"""The pass: the reference and every candidate on the same batches, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fp8calib.data.plan import Batch
from fp8calib.errors import VerificationError
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Site
from fp8calib.machine.allocator import return_freed_memory
from fp8calib.model.load import LoadedModel
from fp8calib.run.forward.lm_head import open_head
from fp8calib.verification.compare.token_scores import TokenScores, join_scores, score_batch
from fp8calib.verification.emulation.emulate import EmulatingTaps, Emulation, emulated
from fp8calib.verification.emulation.scale_range import ScaleRange
from fp8calib.verification.emulation.weights import Originals, WeightChange

_REFERENCE = "the unquantized model"
_OVERFLOW = "float16 overflows at 65504: try --dtype bfloat16 or float32"
_NO_OVERFLOW = {
    True: "the model gives them before anything is quantized: compare its files with their source",
    False: "quantization makes them of finite numbers: look at its scales (`fp8calib show`)",
}
_HIDDEN_SHARE = 6
"""Hidden states that wait for the head may take this part of the weights' memory: 1/6."""


class Advance(Protocol):
    """Is told how many tokens went through the model."""

    def __call__(self, steps: int) -> None:
        """Go on by `steps`."""


@dataclass(slots=True)
class Compared:
    """What became of the candidates."""

    reference: TokenScores
    candidates: dict[str, TokenScores]
    damage: dict[str, dict[Site, torch.Tensor]]
    """Candidate -> site -> sums of `fp8calib.verify.quantizer.measure_damage`, on the CPU."""
    weight_scales: dict[str, dict[Site, ScaleRange]]
    """Candidate -> weight -> the scales it was quantized with."""


class Comparing(Protocol):
    """Compares the unquantized model with its emulations."""

    def run(
        self,
        batches: Iterable[Batch],
        emulations: Mapping[str, Emulation],
        *,
        reference_taps: EmulatingTaps | None = None,
        advance: Advance,
    ) -> Compared:
        """Score every candidate on every batch.

        Args:
            batches: what to run.
            emulations: the candidates by name.
            reference_taps: looks at the tensors of the unquantized model, which they leave alone.
            advance: is told the tokens of every forward pass.

        Raises:
            VerificationError: a model gives NaN or inf; the message names it and the sample.
        """


@dataclass(slots=True)
class _Running:
    taps: dict[str, EmulatingTaps]
    scores: list[list[TokenScores]] = field(default_factory=list)


class Comparison:
    """Runs batches through the unquantized model and its emulations.

    Candidates that change weights change them once for a group of batches, whose hidden states
    wait; the group's size keeps these a small part of the memory the weights take.
    """

    def __init__(self, model: LoadedModel, geometry: ModelGeometry, originals: Originals) -> None:
        self._model = model
        self._geometry = geometry
        self._originals = originals
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    def run(
        self,
        batches: Iterable[Batch],
        emulations: Mapping[str, Emulation],
        *,
        reference_taps: EmulatingTaps | None = None,
        advance: Advance,
    ) -> Compared:
        """Score every candidate on every batch (`Comparing.run`)."""
        taps = {name: EmulatingTaps(e.quantizers) for name, e in emulations.items()}
        running = _Running(taps=taps)
        looking = reference_taps or EmulatingTaps({})
        for group in self._groups(batches, emulations):
            hidden = [list(self._run_group(group, Emulation(), looking, advance))]
            for name, emulation in emulations.items():
                hidden.append(list(self._run_group(group, emulation, taps[name], advance)))
            self._score(group, hidden, running, list(emulations))
        reference, *candidates = (join_scores(parts) for parts in running.scores)
        return Compared(
            reference=reference,
            candidates=dict(zip(emulations, candidates, strict=True)),
            damage={name: on_cpu(found.damage) for name, found in taps.items()},
            weight_scales=self._find_weight_scales(emulations),
        )

    def _find_weight_scales(
        self, emulations: Mapping[str, Emulation]
    ) -> dict[str, dict[Site, ScaleRange]]:
        values = {name: parameter.data for name, parameter in self._model.named_parameters()}
        return {
            name: find_weight_scales(emulation.weights, values)
            for name, emulation in emulations.items()
        }

    def _run_group(
        self,
        group: Sequence[Batch],
        emulation: Emulation,
        taps: EmulatingTaps,
        advance: Advance,
    ) -> Iterator[torch.Tensor]:
        with emulated(
            self._model, self._geometry, emulation, taps, originals=self._originals
        ) as runner:
            for batch in group:
                yield runner.run(batch)
                advance(batch.num_tokens)

    def _score(
        self,
        group: Sequence[Batch],
        hidden: list[list[torch.Tensor]],
        running: _Running,
        names: Sequence[str],
    ) -> None:
        if len(group) > 1:  # the scores of a batch alone leave no holes worth the time
            return_freed_memory()
        with open_head(self._model) as head:
            for index, batch in enumerate(group):
                reference, *others = (states[index] for states in hidden)
                scores = score_batch(batch, reference, others, head.logits, self._vocab_size)
                require_finite(names, scores, batch, self._model.dtype)
                if not running.scores:
                    running.scores = [[] for _ in scores]
                for parts, found in zip(running.scores, scores, strict=True):
                    parts.append(found)

    def _groups(
        self, batches: Iterable[Batch], emulations: Mapping[str, Emulation]
    ) -> Iterator[list[Batch]]:
        if not any(emulation.weights for emulation in emulations.values()):
            yield from ([batch] for batch in batches)
            return
        limit = self._tokens_at_once(len(emulations) + 1)
        group: list[Batch] = []
        for batch in batches:
            if group and sum(b.input_ids.numel() for b in group) + batch.input_ids.numel() > limit:
                yield group
                group = []
            group.append(batch)
        if group:
            yield group

    def _tokens_at_once(self, num_models: int) -> int:
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        config = self._model.config.get_text_config(decoder=True)
        per_token = config.hidden_size * self._model.dtype.itemsize * num_models
        return int(weights // _HIDDEN_SHARE // per_token)


def require_finite(
    names: Sequence[str], scores: Sequence[TokenScores], batch: Batch, dtype: torch.dtype
) -> None:
    """Look for NaN and inf in the scores of the reference and of the candidates called `names`.

    Raises:
        VerificationError: the message names the model and the sample.
    """
    for name, found in zip((_REFERENCE, *names), scores, strict=True):
        _require_finite(name, found, batch, dtype)


def _require_finite(name: str, scores: TokenScores, batch: Batch, dtype: torch.dtype) -> None:
    good = scores.logprobs.isfinite() & scores.klds.isfinite()
    if bool(good.all()):
        return
    row = 0
    bad = int((~good).nonzero()[0])
    for length in batch.lengths:
        if bad < length - 1:
            break
        bad -= length - 1
        row += 1
    raise VerificationError(
        f"{name}: NaN or inf in the logits at sample {batch.first + row} (counting from 0)",
        hint=_OVERFLOW if dtype is torch.float16 else _NO_OVERFLOW[name == _REFERENCE],
    )


def find_weight_scales(
    changes: Sequence[WeightChange], values: Mapping[str, torch.Tensor]
) -> dict[Site, ScaleRange]:
    """Give the scales that weights are quantized with, `values` being unquantized."""
    return {
        site: found
        for change in changes
        for parameter, found in change.find_scales(values)
        for site in parameter.sites
    }


def on_cpu(damage: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
    """Bring sums of damage to the CPU."""
    return {site: sums.cpu() for site, sums in damage.items()}
