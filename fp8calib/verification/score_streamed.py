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
from functools import partial
from typing import Any

import torch

from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.hooks import HookedCache
from fp8calib.calibration.layer_steps import NO_STREAMING_HINT
from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel, store_calls
from fp8calib.calibration.streamed_weights import EmbeddingRows
from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError, VerificationError
from fp8calib.verification.emulation.candidate import blaming
from fp8calib.verification.emulation.emulate import EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.weights import HeldWeight, WeightChange, changed_weights
from fp8calib.verification.token_scores import Logits, open_lm_head


class _Lane:
    """One of the models that run through the layers side by side: the reference or a candidate.

    Attributes:
        by_layer: changes to the weights of a layer, by its index.
        around: changes to weights outside the layers (norms).
        rows: rows of embeddings that differ in this model.
        first: the first layer that it changes; the number of layers where it changes none.
    """

    def __init__(self, streamed: StreamedModel, hooks: EmulationHooks) -> None:
        self._streamed, self.hooks, candidate = streamed, hooks, hooks.candidate
        self.by_layer: dict[int, list[WeightChange]] = defaultdict(list)
        self.around: list[WeightChange] = []
        self.rows: list[tuple[EmbeddingRows, torch.Tensor]] = []
        layers = streamed.geometry.layers
        for change in candidate.weights:
            name = change.parameters[0].name
            inside = (each.index for each in layers if name.startswith(f"{each.module}."))
            if (index := next(inside, None)) is not None:
                self.by_layer[index].append(change)
            elif (embedding := streamed.embeddings.get(name)) is not None:
                assert isinstance(change, HeldWeight)  # noqa: S101 -- no scheme quantizes it
                try:
                    read = partial(change.source.read_rows, name)
                    self.rows.append((embedding, embedding.read_others(read)))
                except (IndexError, RuntimeError) as error:
                    raise VerificationError(
                        f"{name} has another shape in the FP8 checkpoint: {error}",
                        hint="name the model that the checkpoint was made from",
                    ) from error
            else:
                self.around.append(change)
        modules = {*(site.module for site in candidate.quantizers), *candidate.reads}
        changed = (
            layer.index
            for layer in layers
            if layer.index in self.by_layer
            or (layer.attention is not None and layer.attention.module in modules)
            or not modules.isdisjoint(linear.module for linear in layer.linears)
        )
        self.first = 0 if self.around or self.rows else min(changed, default=len(layers))

    @contextmanager
    def changed(self, layer: StreamedLayer | None = None) -> Iterator[None]:
        """Apply its changes to the weights around the layers, and to one layer if given."""
        model, told = self._streamed.model, (self.hooks.damage, self.hooks.weight_scales)
        with ExitStack() as stack:
            stack.enter_context(blaming(self.hooks.candidate.name))
            for embedding, rows in self.rows:
                stack.enter_context(embedding.replaced(rows))
            if self.around:
                originals = self._streamed.prepared.weights
                stack.enter_context(changed_weights(model, self.around, originals, *told))
            if layer is not None and (changes := self.by_layer.get(layer.layer.index)):
                stack.enter_context(changed_weights(model, changes, layer.weights, *told))
            yield


def run_streamed(
    streamed: StreamedModel,
    models: Sequence[EmulationHooks],
    batches: Sequence[Batch],
    advance: Callable[[int], None],
    add: Callable[[Batch, Sequence[torch.Tensor], Logits], None],
    vocab_size: int,
) -> None:
    """Run batches through all models, layer by layer.

    `add` gets each batch with the last hidden states, and the output head.
    """
    geometry, decoder = streamed.geometry, Decoder(streamed.model)
    attentions, num_layers = geometry.owners(), len(geometry.layers)
    lanes = []
    for hooks in models:
        with blaming(hooks.candidate.name):
            lanes.append(_Lane(streamed, hooks))
    lanes[0].first = 0  # the reference
    has_media = any(batch.media is not None for batch in batches)
    store = streamed.open_hidden_states()
    with streamed.steps(decoder, batches, store) as steps:
        find_calls = []  # what stands before the decoder runs once for each model
        for number, lane in enumerate(lanes):
            find_calls.append(decoder.find_call)
            if has_media and (lane.around or lane.rows):
                with streamed.placed_towers(), lane.changed():
                    find_calls[-1] = store_calls(decoder, store, batches, number=number)

        def prepare(number: int, index: int, place: int) -> tuple[HookedCache, Any]:
            """Give a cache, and the state before a layer, which may be the reference's."""
            decoder.find_call = find_calls[number]
            source = 0 if index == lanes[number].first else number
            before = store.get((source, place), decoder.device) if index else None
            return HookedCache(decoder.config, attentions, (), lanes[number].hooks), before

        def run_layer(number: int, layer: StreamedLayer) -> None:
            hooks, index = lanes[number].hooks, layer.layer.index
            one = geometry.model_copy(update={"layers": (geometry.layers[index],)})
            with (
                lanes[number].changed(layer),
                open_emulation_hooks(streamed.model, one, hooks),
            ):
                for place, batch in enumerate(batches):
                    if index >= lanes[number].first:
                        cache, before = prepare(number, index, place)
                        hooks.begin_batch(batch)
                        checks = number == place == 0
                        after = steps.run_layer(index, batch, cache, before, checks=checks)
                        hooks.end_batch()
                        store.put((number, place), after)
                    advance(batch.num_tokens)

        with streamed.layers() as layers:
            for layer in layers:
                index = layer.layer.index
                keep = any(index in lane.by_layer for lane in lanes)
                # Those that begin here run before the reference replaces what it gave to it.
                order = sorted(range(len(lanes)), key=lambda n: lanes[n].first != index)
                with streamed.placed(layer, keep=keep):
                    for number in order:
                        run_layer(number, layer)
        for number in reversed(range(len(lanes))):
            with lanes[number].changed():  # the last norm
                for place, batch in enumerate(batches):
                    hidden = steps.finish(batch, *prepare(number, num_layers, place))
                    store.put((number, place), (hidden, {}))
    with streamed.load_rest_on_demand(), open_lm_head(streamed.model) as logits:

        def whole(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            if found.shape[-1] < vocab_size:  # only some rows are loaded
                name = type(streamed.model).__name__
                raise ModelError(
                    f"{name} computes logits from its embedding directly",
                    hint=NO_STREAMING_HINT,
                )
            return found

        for place, batch in enumerate(batches):
            keys = [(number, place) for number in range(len(lanes))]
            add(batch, [store.get(key, decoder.device)[0] for key in keys], whole)
