"""Run a model that does not fit into memory, and its candidates, layer by layer.

Each layer's weights are read once. The reference runs all batches through the layer, then each
candidate does, with its changes to the layer's weights applied and undone. A candidate begins at
the first layer that it changes, with what the reference gives to it. Batches, and their order at
each site, are those of a model in memory whole: the numbers are the same, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from fp8calib.calibration.decoder import Decoder, DecoderCall
from fp8calib.calibration.hooks import HookedCache
from fp8calib.calibration.layer_steps import NO_STREAMING_HINT, LayerState, LayerSteps
from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel, store_calls
from fp8calib.calibration.streamed_weights import EmbeddingRows
from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError, VerificationError
from fp8calib.verification.emulation.candidate import Candidate, blaming
from fp8calib.verification.emulation.emulate import EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.stored import CopiedParameter
from fp8calib.verification.emulation.weights import WeightChange, changed_weights
from fp8calib.verification.lm_head import open_lm_head
from fp8calib.verification.token_scores import Logits


@dataclass(slots=True, kw_only=True)
class _Lane:
    """One of the models that run through the layers side by side: the reference or a candidate."""

    number: int
    candidate: Candidate
    hooks: EmulationHooks
    by_layer: dict[int, list[WeightChange]] = field(default_factory=lambda: defaultdict(list))
    around: list[WeightChange] = field(default_factory=list)
    """Changes to weights outside the layers (norms)."""
    rows: list[tuple[EmbeddingRows, torch.Tensor]] = field(default_factory=list)
    """Rows of embeddings that differ in this model."""
    first: int = 0
    """The first layer that it changes; the number of layers where it changes none."""
    find_call: Callable[[Batch], DecoderCall | None] = lambda _batch: None
    """Gives the decoder's arguments for a row with media."""


class StreamedLanes:
    """Runs batches through all models, layer by layer."""

    def __init__(
        self,
        streamed: StreamedModel,
        models: Sequence[tuple[Candidate, EmulationHooks]],
        batches: Sequence[Batch],
        advance: Callable[[int], None],
        vocab_size: int,
    ) -> None:
        self._streamed = streamed
        self._batches = batches
        self._advance = advance
        self._vocab_size = vocab_size
        self._decoder = Decoder(streamed.model)
        self._attentions = streamed.geometry.owners()
        self._num_layers = len(streamed.geometry.layers)
        self._lanes: list[_Lane] = []
        for number, (candidate, hooks) in enumerate(models):
            with blaming(candidate.name):
                self._lanes.append(self._make_lane(number, candidate, hooks))

    def run(self, add: Callable[[Batch, Sequence[torch.Tensor], Logits], None]) -> None:
        """Run all batches; `add` gets each with the last hidden states, and the output head."""
        streamed, device, num_batches = self._streamed, self._decoder.device, len(self._batches)
        with streamed.open_hidden_states() as store:
            self._store = store
            with streamed.steps(self._decoder, self._batches, store) as steps:
                self._find_calls()
                with streamed.layers() as layers:
                    for layer in layers:
                        self._run_layer(steps, layer)
                    for lane in reversed(self._lanes):
                        self._finish(steps, lane)
            with streamed.load_rest_on_demand(), open_lm_head(streamed.model) as logits:

                def whole(hidden: torch.Tensor) -> torch.Tensor:
                    found = logits(hidden)
                    if found.shape[-1] < self._vocab_size:  # only some rows are loaded
                        name = type(streamed.model).__name__
                        raise ModelError(
                            f"{name} computes logits from its embedding directly",
                            hint=NO_STREAMING_HINT,
                        )
                    return found

                for place, batch in enumerate(self._batches):
                    keys = range(place, num_batches * len(self._lanes), num_batches)
                    add(batch, [store.get(key, device).output for key in keys], whole)

    def _key(self, lane: _Lane, place: int) -> int:
        return lane.number * len(self._batches) + place

    def _make_lane(self, number: int, candidate: Candidate, hooks: EmulationHooks) -> _Lane:
        lane = _Lane(number=number, candidate=candidate, hooks=hooks)
        layers = self._streamed.geometry.layers
        for change in candidate.weights:
            name = change.parameters[0].name
            inside = (each.index for each in layers if name.startswith(f"{each.module}."))
            if (index := next(inside, None)) is not None:
                lane.by_layer[index].append(change)
            elif (embedding := self._streamed.embeddings.get(name)) is not None:
                assert isinstance(change, CopiedParameter)  # noqa: S101 -- no scheme quantizes it
                try:
                    lane.rows.append((embedding, embedding.read_others(change.read_rows)))
                except (IndexError, RuntimeError) as error:
                    raise VerificationError(
                        f"{name} has another shape in the FP8 checkpoint: {error}",
                        hint="name the model that the checkpoint was made from",
                    ) from error
            else:
                lane.around.append(change)
        if number and not (lane.around or lane.rows):
            modules = {*(site.module for site in candidate.quantizers), *candidate.reads}
            changed = (
                layer.index
                for layer in layers
                if layer.index in lane.by_layer
                or (layer.attention is not None and layer.attention.module in modules)
                or not modules.isdisjoint(linear.module for linear in layer.linears)
            )
            lane.first = min(changed, default=len(layers))
        return lane

    def _find_calls(self) -> None:
        """Run what stands before the decoder once for each model."""
        has_media = any(batch.media is not None for batch in self._batches)
        for lane in self._lanes:
            lane.find_call = self._decoder.find_call
            if has_media and (lane.around or lane.rows):
                with self._streamed.placed_towers(), self._changed(lane, None):
                    lane.find_call = store_calls(
                        self._decoder, self._store, self._batches, number=lane.number
                    )

    def _run_layer(self, steps: LayerSteps, layer: StreamedLayer) -> None:
        index = layer.layer.index
        geometry = self._streamed.geometry
        one_layer = geometry.model_copy(update={"layers": (geometry.layers[index],)})
        keep = any(index in lane.by_layer for lane in self._lanes)
        with self._streamed.placed(layer, keep=keep):
            # Those that begin here run before the reference replaces what it gave to this layer.
            for lane in sorted(self._lanes, key=lambda each: each.first != index):
                hooks = open_emulation_hooks(self._streamed.model, one_layer, lane.hooks)
                with self._changed(lane, layer), hooks:
                    for place, batch in enumerate(self._batches):
                        if index >= lane.first:
                            self._run_batch(steps, lane, index, place)
                        self._advance(batch.num_tokens)

    def _run_batch(self, steps: LayerSteps, lane: _Lane, index: int, place: int) -> None:
        batch, key = self._batches[place], self._key(lane, place)
        source = place if index == lane.first else key
        before = self._store.get(source, self._decoder.device) if index else None
        checks = lane.number == 0 and place == 0
        self._decoder.find_call = lane.find_call
        lane.hooks.begin_batch(batch)
        after = steps.run_layer(index, batch, self._cache(lane), before, checks=checks)
        lane.hooks.end_batch()
        self._store.put(key, after)

    def _cache(self, lane: _Lane) -> HookedCache:
        return HookedCache(self._decoder.config, self._attentions, (), lane.hooks)

    @contextmanager
    def _changed(self, lane: _Lane, layer: StreamedLayer | None) -> Iterator[None]:
        """Apply a model's changes to the weights around the layers, and to one layer if given."""
        model, told = self._streamed.model, (lane.hooks.damage, lane.hooks.weight_scales)
        with ExitStack() as stack:
            stack.enter_context(blaming(lane.candidate.name))
            for embedding, rows in lane.rows:
                stack.enter_context(embedding.replaced(rows))
            if lane.around:
                originals = self._streamed.prepared.weights
                stack.enter_context(changed_weights(model, lane.around, originals, *told))
            if layer is not None and (changes := lane.by_layer.get(layer.layer.index)):
                stack.enter_context(changed_weights(model, changes, layer.weights, *told))
            yield

    def _finish(self, steps: LayerSteps, lane: _Lane) -> None:
        """Run what stands behind the layers: the last norm."""
        self._decoder.find_call = lane.find_call
        with self._changed(lane, None):
            for place, batch in enumerate(self._batches):
                source = place if lane.first == self._num_layers else self._key(lane, place)
                before = self._store.get(source, self._decoder.device)
                hidden = steps.finish(batch, self._cache(lane), before)
                self._store.put(self._key(lane, place), LayerState(hidden, {}))
