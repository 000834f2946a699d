"""Drive batches through a model that does not fit into memory, one decoder layer at a time.

Every layer's weights are read once, see all batches, and are dropped before the next layer's are
needed; those are read ahead meanwhile. Batches, and the order in which a site sees them, are those
of `fp8calib.run.whole`, so the statistics are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.checkpoint.reader import Checkpoint
from fp8calib.data.plan import Batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry import Layer, ModelGeometry
from fp8calib.model.topology import text_decoder
from fp8calib.model.weights import WeightSource
from fp8calib.observe.observing import ObservingTaps
from fp8calib.observe.recorder import Recorder, view_batch
from fp8calib.observe.seams import TappedCache, own_attentions
from fp8calib.run.decoder import Decoder
from fp8calib.run.streamed_model import compute_buffers, embedded_by_row, embeddings_by_row
from fp8calib.run.streamed_steps import LayerState, LayerSteps, open_steps
from fp8calib.run.streamed_store import StateStore
from fp8calib.run.streamed_weights import HeldTensors, ModelPart, PartedWeights, ReadAhead
from fp8calib.run.whole import GPU_BATCHES_PER_CHECK, nonfinite_error, one_by_one
from fp8calib.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How a model is streamed."""

    dtype: torch.dtype
    device: str
    hidden_ram_bytes: int
    """Hidden states beyond this wait in a file."""
    scratch: Path
    """Folder of that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedLayer:
    """A decoder layer whose tensors were read."""

    layer: Layer
    part: ModelPart
    held: HeldTensors
    weights: WeightSource
    """Over what was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayer:
    """The first layer of a model, still to be read, and how to run a micro-batch through it."""

    layers: Iterator[StreamedLayer]
    run: Callable[[], LayerState]


class StreamedModel:
    """A model whose layers come and go; made by `open_streamed`."""

    def __init__(
        self, model: PreTrainedModel, geometry: ModelGeometry, parted: PartedWeights
    ) -> None:
        self.model = model
        self.geometry = geometry
        self._begin_next: Callable[[], None] = lambda: None
        self._parted = parted
        self._parts = layer_parts(geometry, parted)

    @contextmanager
    def layers(self, *, until: int | None = None) -> Iterator[Iterator[StreamedLayer]]:
        """Walk the layers (the first `until` of them), each read while the one before is used."""
        with ReadAhead(self._parted, self._parts[:until]) as reading:
            self._begin_next = reading.begin_next
            yield (
                StreamedLayer(layer=layer, part=part, held=held, weights=self._parted.over(held))
                for layer, (part, held) in zip(self.geometry.layers, reading, strict=False)
            )

    @contextmanager
    def placed(self, layer: StreamedLayer, *, keep: bool = False) -> Iterator[None]:
        """Hold a layer's weights in the model while the context is open.

        `keep` also keeps what was read, for those who change the weights and restore them.
        """
        self._parted.place(layer.part, layer.held, keep=keep)
        self._begin_next()
        try:
            yield
        finally:
            self._parted.drop(layer.part)

    def pass_over(self) -> None:
        """Tell that a layer's weights are not placed: the next one may be read."""
        self._begin_next()


@contextmanager
def open_streamed(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    weights: WeightSource,
    checkpoint: Checkpoint,
    tokens: torch.Tensor,
    streaming: Streaming,
) -> Iterator[StreamedModel]:
    """Make a model that was built without weights ready to be streamed.

    Args:
        model: built without weights, in the dtype it will compute in.
        geometry: its geometry.
        weights: its parameters.
        checkpoint: where they are read.
        tokens: ids of the text, whose embeddings are read.
        streaming: how.

    Raises:
        ModelError: a weight is missing or has another shape, or the model cannot be streamed.
    """
    dtype, device = streaming.dtype, streaming.device
    parted = PartedWeights(model, weights, checkpoint, dtype=dtype, device=device)
    stored = frozenset(made for group in weights.parameters.values() for made in group)
    compute_buffers(model, stored, device)
    streamed = StreamedModel(model, geometry, parted)
    around = part_around(model, geometry, weights, parted)
    with embedded_by_row(model, weights, checkpoint, tokens, dtype=dtype, device=device):
        parted.place(around, parted.read(around))
        yield streamed


def layer_parts(geometry: ModelGeometry, parted: PartedWeights) -> list[ModelPart]:
    """Gather the parameters of each decoder layer.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    return [
        parted.part(lambda name, path=layer.module: name.startswith(f"{path}."))  # type: ignore[misc]
        for layer in geometry.layers
    ]


def part_around(
    model: PreTrainedModel, geometry: ModelGeometry, weights: WeightSource, parted: PartedWeights
) -> ModelPart:
    """Gather the text decoder's parameters outside its layers, without embeddings read by row.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    path, _ = text_decoder(model)
    own = tuple(f"{layer.module}." for layer in geometry.layers)
    stored = frozenset(made for group in weights.parameters.values() for made in group)
    left_out = computed_names(model, stored) | {
        f"{name}.weight" for name in embeddings_by_row(model, weights)
    }
    return parted.part(
        lambda name: (
            name.startswith(f"{path}." if path else "")
            and not name.startswith(own)
            and name not in left_out
        )
    )


def computed_names(model: PreTrainedModel, stored: frozenset[str]) -> frozenset[str]:
    """Name the persistent buffers that the checkpoint does not hold."""
    return frozenset(name for name, _ in model.named_buffers() if name not in stored)


class _NonfiniteError(Exception):
    """NaN or inf was met at a site of layer `index`, in one of a group of batches."""

    def __init__(self, site: Site, group: Sequence[Batch], index: int) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.index = index


def _ignore(_: object) -> None:
    return None


class StreamedRunner:
    """Runs the text decoder (never the lm_head) layer by layer, and shows all to a recorder."""

    def __init__(
        self,
        streamed: StreamedModel,
        streaming: Streaming,
        *,
        observe_kv: bool,
        ignored: Collection[str],
    ) -> None:
        self._streamed = streamed
        self._streaming = streaming
        self._decoder = Decoder(streamed.model)
        self._attentions = own_attentions(streamed.geometry)
        all_modules = {attention.module for attention in self._attentions.values()}
        self._ignored = frozenset(ignored) if observe_kv else frozenset(all_modules)

    def run(
        self,
        batches: Sequence[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
        *,
        meet_layer: Callable[[StreamedLayer], None],
    ) -> None:
        """Run all batches through every layer in turn.

        Args:
            batches: the micro-batches.
            recorder: is shown them, once a layer.
            advance: is told the tokens of each, once a layer.
            meet_layer: is shown every layer when its tensors were read, before it runs.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names layer and sample.
        """
        try:
            self._walk(batches, recorder, advance, meet_layer, until=None)
        except _NonfiniteError as error:
            raise self._locate(error, recorder) from None

    @contextmanager
    def first_layer(self, batch: Batch, recorder: Recorder) -> Iterator[FirstLayer]:
        """Open the first layer alone, to try it with one micro-batch."""
        with ExitStack() as stack:
            steps = stack.enter_context(open_steps(self._decoder, self._modules()))
            layers = stack.enter_context(self._streamed.layers(until=1))

            def run() -> LayerState:
                return self._run_batch(steps, 0, batch, recorder, None, checks=False)

            yield FirstLayer(layers=layers, run=run)

    def _modules(self) -> list[nn.Module]:
        model = self._streamed.model
        return [model.get_submodule(layer.module) for layer in self._streamed.geometry.layers]

    def _locate(self, found: _NonfiniteError, recorder: Recorder) -> CalibrationError:
        """Go down to the layer again, one sequence at a time: that finds the one at fault."""
        dtype = self._decoder.dtype
        if len(found.group) == 1 and len(found.group[0].lengths) == 1:
            return nonfinite_error(found.site, found.group[0].first, dtype)
        for single in one_by_one(found.group):
            recorder.forget()
            try:
                self._walk([single], recorder, _ignore, _ignore, until=found.index + 1)
            except _NonfiniteError as error:
                return nonfinite_error(error.site, single.first, dtype)
        return CalibrationError("NaN or inf in an activation of a batch, but in no sequence alone")

    def _walk(
        self,
        batches: Sequence[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
        meet_layer: Callable[[StreamedLayer], None],
        *,
        until: int | None,
    ) -> None:
        with ExitStack() as stack:
            steps = stack.enter_context(open_steps(self._decoder, self._modules()))
            store = stack.enter_context(open_store(self._streaming))
            for layer in stack.enter_context(self._streamed.layers(until=until)):
                meet_layer(layer)
                with self._streamed.placed(layer):
                    self._run_layer(steps, store, layer, batches, recorder, advance)

    def _run_layer(
        self,
        steps: LayerSteps,
        store: StateStore,
        layer: StreamedLayer,
        batches: Sequence[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
    ) -> None:
        index, unchecked = layer.layer.index, []
        for number, batch in enumerate(batches):
            self._step(steps, store, index, number, batch, recorder)
            unchecked.append(batch)
            advance(batch.num_tokens)
            if self._is_full(unchecked) or number == len(batches) - 1:
                if (site := recorder.check_finite()) is not None:
                    raise _NonfiniteError(site, unchecked, index)
                unchecked = []

    def _is_full(self, group: Sequence[Batch]) -> bool:
        return self._decoder.device.type == "cpu" or len(group) >= GPU_BATCHES_PER_CHECK

    def _step(
        self,
        steps: LayerSteps,
        store: StateStore,
        index: int,
        number: int,
        batch: Batch,
        recorder: Recorder,
    ) -> None:
        before = load_state(store, number, self._decoder.device) if index else None
        after = self._run_batch(steps, index, batch, recorder, before, checks=number == 0)
        if index < len(self._streamed.geometry.layers) - 1:
            store.put(number, (after.output, after.shared))

    def _run_batch(
        self,
        steps: LayerSteps,
        index: int,
        batch: Batch,
        recorder: Recorder,
        before: LayerState | None,
        *,
        checks: bool,
    ) -> LayerState:
        rows, columns = batch.input_ids.shape
        recorder.begin_batch(view_batch((rows, columns), batch.lengths, batch.first, batch.quarter))
        cache = TappedCache(
            self._decoder.config, self._attentions, self._ignored, ObservingTaps(recorder)
        )
        after = steps.run_layer(index, batch, cache, before, checks=checks)
        recorder.end_batch()
        return after


def open_store(streaming: Streaming) -> StateStore:
    """Open the store of hidden states that a way of streaming asks for."""
    return StateStore(ram_limit_bytes=streaming.hidden_ram_bytes, folder=streaming.scratch)


def load_state(store: StateStore, number: int, device: torch.device) -> LayerState:
    """Take what a micro-batch has become out of the store."""
    output, shared = store.get(number, device)
    return LayerState(output=output, shared=shared)
