"""Compare a model that does not fit into memory with its emulations, layer by layer.

Each layer's weights are read once. The reference runs all batches through the layer, then each
candidate does, with its changes to the layer's weights applied and undone. A candidate begins at
the first layer that it changes, with what the reference gives to it. Batches, and their order at
each site, are those of `compare/whole.py`: the numbers are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError, VerificationError
from fp8calib.observe.hooks import HookedCache
from fp8calib.run.forward.decoder import Decoder, DecoderCall
from fp8calib.run.forward.lm_head import open_lm_head
from fp8calib.run.streaming.embeddings import EmbeddingRows
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_steps import LayerState, LayerSteps
from fp8calib.run.streaming.model import (
    StreamedLayer,
    StreamedModel,
    store_calls,
)
from fp8calib.verification.compare.comparison import (
    Advance,
    ComparisonResult,
    ScoreCollector,
    blaming,
)
from fp8calib.verification.compare.token_scores import Logits
from fp8calib.verification.emulation.decoding import make_hooks
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.stored_weights import CopiedParameter
from fp8calib.verification.emulation.weights import WeightChange, changed_weights


@dataclass(slots=True, kw_only=True)
class _Lane:
    """One of the models that run through the layers side by side: the reference or a candidate."""

    number: int
    name: str
    """That of the candidate; empty for the reference."""
    emulation: Emulation
    hooks: EmulationHooks
    by_layer: Mapping[int, tuple[WeightChange, ...]]
    around: tuple[WeightChange, ...]
    """Changes to weights outside the layers (norms)."""
    rows: tuple[tuple[EmbeddingRows, torch.Tensor], ...]
    """Rows of embeddings that differ in this model."""
    first: int = 0
    """The first layer that it changes; the number of layers where it changes none."""
    find_call: Callable[[Batch], DecoderCall | None] = lambda _batch: None
    """Gives the decoder's arguments for a row with media."""

    @property
    def changes_calls(self) -> bool:
        """Whether it gives the decoder other arguments for a row with media."""
        return bool(self.around or self.rows)


class StreamedComparison:
    """Runs batches through all models, layer by layer."""

    def __init__(self, streamed: StreamedModel) -> None:
        self.streamed = streamed
        self._originals = streamed.prepared.weights
        self._model = streamed.model
        self._decoder = Decoder(streamed.model)
        self._attentions = streamed.geometry.owners()

    @property
    def num_layers(self) -> int:
        """The layers of the model."""
        return len(self.streamed.geometry.layers)

    def run(
        self,
        batches: Iterable[Batch],
        emulations: Mapping[str, Emulation],
        *,
        reference_hooks: EmulationHooks | None = None,
        watched: Sequence[torch.Tensor] | None = None,
        advance: Advance,
    ) -> ComparisonResult:
        """Score every candidate on every batch (`Comparison.run`)."""
        todo = list(batches)
        lanes = self._make_lanes(emulations, reference_hooks or EmulationHooks({}))
        scores = ScoreCollector(self._model, emulations, watched)
        with self.streamed.open_hidden_states() as store:
            self._walk(todo, lanes, store, advance)
            self._score(todo, lanes, store, scores)
        return scores.finish([lane.hooks for lane in lanes[1:]])

    @contextmanager
    def _steps(
        self, batches: Sequence[Batch], lanes: Sequence[_Lane], store: HiddenStateStore
    ) -> Iterator[LayerSteps]:
        """Let single layers run; what runs before the decoder runs once for each model."""
        has_media = any(batch.media is not None for batch in batches)
        with self.streamed.steps(self._decoder, batches, store) as steps:
            for lane in lanes:
                lane.find_call = (
                    self._run_towers(lane, batches, store)
                    if has_media and lane.changes_calls
                    else self._decoder.find_call
                )
            yield steps

    def _run_towers(
        self, lane: _Lane, batches: Sequence[Batch], store: HiddenStateStore
    ) -> Callable[[Batch], DecoderCall]:
        with self.streamed.placed_towers(), self._changed(lane, None):
            return store_calls(self._decoder, store, batches, number=lane.number)

    # --- the models -----------------------------------------------------------------------------

    def _make_lanes(
        self, emulations: Mapping[str, Emulation], reference: EmulationHooks
    ) -> list[_Lane]:
        lanes = [self._make_lane(0, "", Emulation(), reference)]
        for number, (name, emulation) in enumerate(emulations.items(), start=1):
            with blaming(name):
                lanes.append(self._make_lane(number, name, emulation, make_hooks(emulation)))
        return lanes

    def _make_lane(
        self, number: int, name: str, emulation: Emulation, hooks: EmulationHooks
    ) -> _Lane:
        by_layer: dict[int, tuple[WeightChange, ...]] = {}
        around: list[WeightChange] = []
        rows: list[tuple[EmbeddingRows, torch.Tensor]] = []
        paths = {f"{layer.module}.": layer.index for layer in self.streamed.geometry.layers}
        for change in emulation.weights:
            name = change.parameters[0].name
            index = next((i for path, i in paths.items() if name.startswith(path)), None)
            if index is not None:
                by_layer[index] = (*by_layer.get(index, ()), change)
            elif (embedding := self.streamed.embeddings.get(name)) is not None:
                rows.append((embedding, _read_rows(embedding, change)))
            else:
                around.append(change)
        lane = _Lane(
            number=number,
            name=name,
            emulation=emulation,
            hooks=hooks,
            by_layer=by_layer,
            around=tuple(around),
            rows=tuple(rows),
        )
        if number and not lane.changes_calls:
            lane.first = self._find_first(emulation, by_layer)
        return lane

    def _find_first(self, emulation: Emulation, by_layer: Collection[int]) -> int:
        """Find the first layer that an emulation changes."""
        modules = {*(site.module for site in emulation.quantizers), *emulation.reads}
        changed = (
            layer.index
            for layer in self.streamed.geometry.layers
            if layer.index in by_layer
            or (layer.attention is not None and layer.attention.module in modules)
            or not modules.isdisjoint(linear.module for linear in layer.linears)
        )
        return min(changed, default=self.num_layers)

    # --- the layers -----------------------------------------------------------------------------

    def _walk(
        self,
        batches: Sequence[Batch],
        lanes: Sequence[_Lane],
        store: HiddenStateStore,
        advance: Advance,
    ) -> None:
        with ExitStack() as stack:
            steps = stack.enter_context(self._steps(batches, lanes, store))
            for layer in stack.enter_context(self.streamed.layers()):
                index = layer.layer.index
                keep = any(index in lane.by_layer for lane in lanes)
                with self.streamed.placed(layer, keep=keep):
                    for lane in sorted(lanes, key=lambda each: each.first != index):
                        with self._changed(lane, layer), self._open_hooks(lane, index):
                            self._run_layer(steps, lane, index, batches, store, advance)
            for lane in reversed(lanes):
                self._finish(steps, lane, batches, store)

    def _run_layer(
        self,
        steps: LayerSteps,
        lane: _Lane,
        index: int,
        batches: Sequence[Batch],
        store: HiddenStateStore,
        advance: Advance,
    ) -> None:
        for place, batch in enumerate(batches):
            key = lane.number * len(batches) + place
            if index < lane.first:
                advance(batch.num_tokens)
                continue
            # those that begin here run before the reference replaces what it gave to this layer
            source = place if index == lane.first else key
            before = store.get(source, self._decoder.device) if index else None
            checks = lane.number == 0 and place == 0
            after = self._run_batch(steps, lane, index, batch, before, checks=checks)
            store.put(key, after)
            advance(batch.num_tokens)

    def _run_batch(
        self,
        steps: LayerSteps,
        lane: _Lane,
        index: int,
        batch: Batch,
        before: LayerState | None,
        *,
        checks: bool = False,
    ) -> LayerState:
        self._decoder.find_call = lane.find_call
        lane.hooks.begin_batch(batch)
        after = steps.run_layer(index, batch, self._cache(lane), before, checks=checks)
        lane.hooks.end_batch()
        return after

    def _cache(self, lane: _Lane) -> HookedCache:
        return HookedCache(self._decoder.config, self._attentions, (), lane.hooks)

    @contextmanager
    def _changed(self, lane: _Lane, layer: StreamedLayer | None) -> Iterator[None]:
        """Apply a model's changes to the weights around the layers, and to one layer if given."""
        with ExitStack() as stack:
            stack.enter_context(blaming(lane.name))
            for embedding, rows in lane.rows:
                stack.enter_context(embedding.replaced(rows))
            told = lane.hooks.damage, lane.hooks.weight_scales
            if lane.around:
                stack.enter_context(
                    changed_weights(self._model, lane.around, self._originals, *told)
                )
            if layer is not None and (changes := lane.by_layer.get(layer.layer.index)):
                stack.enter_context(changed_weights(self._model, changes, layer.weights, *told))
            yield

    def _open_hooks(self, lane: _Lane, index: int) -> AbstractContextManager[None]:
        geometry = self.streamed.geometry
        one_layer = geometry.model_copy(update={"layers": (geometry.layers[index],)})
        return open_emulation_hooks(self._model, one_layer, lane.hooks)

    # --- after the layers -----------------------------------------------------------------------

    def _finish(
        self, steps: LayerSteps, lane: _Lane, batches: Sequence[Batch], store: HiddenStateStore
    ) -> None:
        self._decoder.find_call = lane.find_call
        with self._changed(lane, None):
            for place, batch in enumerate(batches):
                key = lane.number * len(batches) + place
                source = place if lane.first == self.num_layers else key
                before = store.get(source, self._decoder.device)
                hidden = steps.finish(batch, self._cache(lane), before)
                store.put(key, LayerState(hidden, {}))

    def _score(
        self,
        batches: Sequence[Batch],
        lanes: Sequence[_Lane],
        store: HiddenStateStore,
        scores: ScoreCollector,
    ) -> None:
        device = self._decoder.device
        with self.streamed.load_head_on_demand(), open_lm_head(self._model) as head:
            logits = self._whole_logits(head.logits, scores.vocab_size)
            for place, batch in enumerate(batches):
                keys = [lane.number * len(batches) + place for lane in lanes]
                states = [store.get(key, device).output for key in keys]
                scores.add(batch, states, logits)

    def _whole_logits(self, logits: Logits, vocab_size: int) -> Logits:
        """Refuse a head that uses the embedding itself, of which only some rows are loaded."""

        def checked(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            if found.shape[-1] < vocab_size:
                raise ModelError(
                    f"{type(self._model).__name__} computes logits from its embedding directly",
                    hint="it cannot be streamed: leave out --memory, or use a larger machine",
                )
            return found

        return checked


def _read_rows(embedding: EmbeddingRows, change: WeightChange) -> torch.Tensor:
    assert isinstance(change, CopiedParameter)  # noqa: S101 -- no scheme quantizes an embedding
    try:
        return embedding.read_others(change.read_rows)
    except (IndexError, RuntimeError) as error:
        raise VerificationError(
            f"{change.parameters[0].name} has another shape in the FP8 checkpoint: {error}",
            hint="name the model that the checkpoint was made from",
        ) from error
