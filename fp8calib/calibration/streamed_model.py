"""A model whose decoder layers are loaded one after another, each from one read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from fp8calib.calibration.decoder import (
    Decoder,
    DecoderCall,
    OutOfMemoryInForward,
    replaced_forward,
)
from fp8calib.calibration.hooks import changed_input
from fp8calib.calibration.layer_steps import NO_STREAMING_HINT, HiddenStateStore, LayerSteps
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.streamed_weights import (
    EmbeddingRows,
    HeldTensors,
    ModelPart,
    PartLoader,
    embeddings_by_row,
    set_tensor,
)
from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError
from fp8calib.machine import keep_freed_memory
from fp8calib.model.geometry import Layer
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.topology import find_text_decoder
from fp8calib.model.weight_source import WeightSource


@dataclass(slots=True, kw_only=True)
class StreamedLayer:
    """A decoder layer whose tensors have been read."""

    layer: Layer
    part: ModelPart
    held: HeldTensors
    weights: WeightSource
    """Reads its parameters from `held`."""
    copied: dict[str, torch.Tensor] = field(default_factory=dict)
    """Its parameters on the GPU; empty if they are not copied ahead."""
    ready: torch.cuda.Event | None = None
    """Recorded after these copies."""


class StreamedModel:
    """A model whose layers are loaded and dropped in turn; made by `open_streamed`.

    Attributes:
        embeddings: the rows of embeddings in memory, by the name of the weight.
        parts: the parameters of each layer.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        loader: PartLoader,
        plan: MemoryPlan,
        embeddings: Mapping[str, EmbeddingRows],
    ) -> None:
        self.prepared = prepared
        self.model, self.geometry = prepared.model, prepared.geometry
        self.device = torch.device(loader.device)
        self.embeddings = embeddings
        self.parts = loader.layers()
        self._loader = loader
        self._plan = plan
        self._begin_next: Callable[[], None] = lambda: None
        self._copying: torch.cuda.Stream | None = None
        if plan.copies_ahead:
            self._copying = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._computed: torch.cuda.Event | None = None
        """Recorded after the last use of the layer that was dropped last."""

    def open_hidden_states(self) -> HiddenStateStore:
        """Open the store of the hidden states between two layers."""
        return HiddenStateStore(
            ram_limit_bytes=self._plan.hidden_ram_bytes,
            folder=self._plan.scratch,
            gpu_limit_bytes=self._plan.hidden_gpu_bytes,
        )

    @contextmanager
    def layers(self, *, first: int = 0) -> Iterator[Iterator[StreamedLayer]]:
        """Iterate over the layers from `first` on; a thread reads each while the one before runs.

        Raises:
            OutOfMemoryInForward: a GPU has no room for the next layer beside a batch.
        """
        unread = zip(self.geometry.layers[first:], self.parts[first:], strict=True)
        reading: deque[Future[StreamedLayer]] = deque()

        def read(layer: Layer, part: ModelPart, earlier: torch.cuda.Event | None) -> StreamedLayer:
            held = self._loader.read(part)
            weights = self._loader.weights.reading_from(held)
            loaded = StreamedLayer(layer=layer, part=part, held=held, weights=weights)
            if self._copying is not None:
                if earlier is not None:
                    earlier.synchronize()  # the GPU has room for two layers, not for three
                self._copy(loaded, self._copying)
            return loaded

        def begin_next() -> None:
            if not reading and (following := next(unread, None)) is not None:
                reading.append(pool.submit(read, *following, self._computed))

        def finished() -> Iterator[StreamedLayer]:
            for _ in self.parts[first:]:
                begin_next()
                yield reading.popleft().result()

        try:
            with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
                self._begin_next = begin_next
                yield finished()
        finally:
            self._begin_next = lambda: None
            reading.clear()  # a layer that is not placed leaves the GPU

    def _copy(self, layer: StreamedLayer, stream: torch.cuda.Stream) -> None:
        """Copy a layer to the GPU, on a stream of its own, in the thread that reads ahead.

        Copies from pageable memory block this thread, which waits for the disk anyway, but no other
        stream. Pinned memory would need one more copy.
        """
        try:
            with torch.cuda.stream(stream):
                for name, tensor in self._loader.make(layer.part, layer.held, keep=True):
                    layer.copied[name] = tensor.to(self.device, non_blocking=True)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryInForward(
                f"out of memory where layer {layer.layer.index} is copied to the GPU",
                hint="use a smaller --batch-size or --seq-len, or --device cpu",
            ) from error
        layer.ready = stream.record_event()

    @contextmanager
    def placed(self, layer: StreamedLayer, *, keep: bool = False) -> Iterator[None]:
        """Put a layer's weights into the model while the context is open.

        With `keep` the tensors that were read stay in memory too, to restore changed weights.
        """
        if layer.ready is None:
            made = self._loader.make(layer.part, layer.held, keep=keep)
        else:
            made = self._take(layer, layer.ready)
            if not keep:
                layer.held.held.clear()
        with self._loader.placed(layer.part, made):
            self._begin_next()
            yield
        if layer.ready is not None:
            self._computed = torch.cuda.current_stream(self.device).record_event()

    def _take(
        self, layer: StreamedLayer, ready: torch.cuda.Event
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Give the copies of a layer to the stream that computes, one at a time."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        while layer.copied:
            name, tensor = layer.copied.popitem()
            tensor.record_stream(current)  # else the next copies may overwrite it in use
            yield name, tensor

    def placed_towers(self) -> AbstractContextManager[None]:
        """Put the weights of what runs before the decoder (vision, audio) into the model."""
        return self._loader.placed(self._loader.towers())

    @contextmanager
    def steps(
        self, decoder: Decoder, batches: Sequence[Batch], store: HiddenStateStore
    ) -> Iterator[LayerSteps]:
        """Replace the forward of each layer, so that layers can run one at a time.

        The towers run once, on the batches with media; their output is stored in `store`.
        """
        with ExitStack() as stack:
            if any(batch.media is not None for batch in batches):
                with self.placed_towers():
                    find_call = store_calls(decoder, store, batches)
                stack.callback(setattr, decoder, "find_call", decoder.find_call)
                decoder.find_call = find_call
            modules = [self.model.get_submodule(layer.module) for layer in self.geometry.layers]
            steps = LayerSteps(decoder, modules)
            for index, module in enumerate(modules):
                forward = partial(steps.forward, index)
                stack.enter_context(replaced_forward(module, forward))
            try:
                yield steps
            finally:
                steps.check()  # which explains NaN, also if they ended the run

    @contextmanager
    def load_rest_on_demand(self) -> Iterator[None]:
        """Load each module outside the text decoder when it first runs.

        The lm_head is such a module. All are dropped when the context closes; what does not run (a
        vision tower) is not read.
        """
        inside = set(find_text_decoder(self.model)[1].modules())

        def load(name: str, module: nn.Module, *_: object) -> None:
            own = dict(module.named_parameters(recurse=False))
            if any(parameter.is_meta for parameter in own.values()):
                part = self._loader.part({f"{name}.{leaf}" for leaf in own}.__contains__)
                stack.enter_context(self._loader.placed(part))

        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if module not in inside and any(True for _ in module.parameters(recurse=False)):
                    handle = module.register_forward_pre_hook(partial(load, name))
                    stack.callback(handle.remove)
            yield


@contextmanager
def open_streamed(
    prepared: PreparedModel, tokens: torch.Tensor, plan: MemoryPlan, device: str
) -> Iterator[StreamedModel]:
    """Prepare a model for streaming; it is built without weights.

    Only the embeddings of `tokens` (int64, any shape) are read.
    """
    keep_freed_memory()
    weights = prepared.weights
    loader = PartLoader(prepared, device=device)
    _compute_buffers(prepared.model, loader)
    embeddings: dict[str, EmbeddingRows] = {}
    with ExitStack() as stack:
        for path, module in embeddings_by_row(weights).items():
            name = f"{path}.weight"
            read_rows = partial(weights.read_rows, name)
            rows = EmbeddingRows(module, read_rows, dtype=prepared.model.dtype, device=device)
            rows.read(tokens[tokens < module.num_embeddings])
            module.padding_idx = None  # used only in training, and may exceed the number of rows
            embeddings[name] = rows
            stack.enter_context(changed_input(module, rows.look_up))
        stack.enter_context(loader.placed(loader.around_layers()))
        yield StreamedModel(prepared, loader, plan, embeddings)


def store_calls(
    decoder: Decoder,
    store: HiddenStateStore,
    batches: Sequence[Batch],
    *,
    number: int = 0,
) -> Callable[[Batch], DecoderCall]:
    """Store the decoder's arguments for each batch with media; give a function that loads them.

    `number` distinguishes the arguments of several models in one store.
    """
    for batch in batches:
        if batch.media is not None:
            cache = DynamicCache(config=decoder.config)
            store.put(("call", number, batch.first), decoder.prepare(batch, cache))

    def find(batch: Batch) -> DecoderCall:
        call: DecoderCall = store.get(("call", number, batch.first), decoder.device)
        return call

    return find


def _compute_buffers(model: PreTrainedModel, loader: PartLoader) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, scales, masks).

    transformers computes them when it initialises weights; it leaves weights on the meta device
    alone. This runs twice, over zeros and over ones: a buffer that keeps them was not computed.
    """
    buffers = model.named_buffers(remove_duplicate=False)
    names = [name for name, x in buffers if x.is_meta and not loader.is_stored(name)]
    if not names:
        return  # computed when the model was opened before
    computed: list[list[torch.Tensor]] = []
    for fill in (0, 1):
        for name in names:
            set_tensor(model, name, torch.full_like(model.get_buffer(name), fill, device="cpu"))
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
        computed.append([model.get_buffer(name).clone() for name in names])
    path = find_text_decoder(model)[0]
    for name, first, second in zip(names, *computed, strict=True):
        is_run = name.startswith(f"{path}." if path else "")
        if is_run and not torch.equal(first, second):
            raise ModelError(
                f"{type(model).__name__}: the buffer {name} is neither stored nor computed",
                hint=NO_STREAMING_HINT,
            )
        set_tensor(model, name, second.to(loader.device))
