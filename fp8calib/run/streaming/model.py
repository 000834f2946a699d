"""A model whose decoder layers are loaded one after another, each from one read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.geometry.model_geometry import Layer, ModelGeometry
from fp8calib.machine.allocator import keep_freed_memory
from fp8calib.model.topology.find import find_text_decoder
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.streaming.buffers import compute_buffers, computed_names
from fp8calib.run.streaming.embeddings import EmbeddingRows, embeddings_by_row, open_embeddings
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_steps import LayerState
from fp8calib.run.streaming.weights import HeldTensors, ModelPart, PartLoader, PartReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How a model is streamed: dtype, device, and where hidden states are stored."""

    dtype: torch.dtype
    device: str
    hidden_ram_bytes: int
    """Hidden states beyond this are stored in a file."""
    scratch: Path
    """The folder of that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedLayer:
    """A decoder layer whose tensors have been read."""

    layer: Layer
    part: ModelPart
    held: HeldTensors
    weights: WeightSource
    """Reads its parameters from `held`."""


class StreamedModel:
    """A model whose layers are loaded and dropped in turn; made by `open_streamed`.

    Attributes:
        model: the model, with weights only in the parts that are loaded.
        geometry: its geometry.
        device: the device it computes on.
        embeddings: the rows of embeddings in memory, by the name of the weight.
    """

    def __init__(self, model: PreTrainedModel, geometry: ModelGeometry, loader: PartLoader) -> None:
        self.model = model
        self.geometry = geometry
        self.device = torch.device(loader.device)
        self.embeddings: Mapping[str, EmbeddingRows] = {}
        self._begin_next: Callable[[], None] = lambda: None
        self._loader = loader
        self._parts = layer_parts(geometry, loader)

    def layer_modules(self) -> list[nn.Module]:
        """Give the modules of the decoder layers."""
        return [self.model.get_submodule(layer.module) for layer in self.geometry.layers]

    @contextmanager
    def layers(self, *, until: int | None = None) -> Iterator[Iterator[StreamedLayer]]:
        """Iterate over the layers, or the first `until`; each is read while the one before runs."""
        with PartReader(self._loader, self._parts[:until]) as reading:
            self._begin_next = reading.begin_next
            yield (
                StreamedLayer(
                    layer=layer, part=part, held=held, weights=self._loader.source_over(held)
                )
                for layer, (part, held) in zip(self.geometry.layers, reading, strict=False)
            )

    @contextmanager
    def placed(self, layer: StreamedLayer, *, keep: bool = False) -> Iterator[None]:
        """Put a layer's weights into the model while the context is open.

        With `keep` the tensors that were read stay in memory too, to restore changed weights.
        """
        self._loader.place(layer.part, layer.held, keep=keep)
        self._begin_next()
        try:
            yield
        finally:
            self._loader.drop(layer.part)

    @contextmanager
    def load_head_on_demand(self) -> Iterator[None]:
        """Load each module outside the text decoder when it first runs.

        All are dropped when the context closes. What does not run (a vision tower) is not read.
        """
        inside = set(find_text_decoder(self.model)[1].modules())
        placed: list[ModelPart] = []
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if module not in inside and any(True for _ in module.parameters(recurse=False)):
                    hook = self._placing_hook(name, module, placed)
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            stack.callback(self._drop_all, placed)
            yield

    def _drop_all(self, parts: Sequence[ModelPart]) -> None:
        for part in parts:
            self._loader.drop(part)

    def _placing_hook(
        self, name: str, module: nn.Module, placed: list[ModelPart]
    ) -> Callable[..., None]:
        own = {f"{name}.{leaf}" for leaf in dict(module.named_parameters(recurse=False))}

        def hook(*_: object) -> None:
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                part = self._loader.part(lambda parameter: parameter in own)
                self._loader.place(part, self._loader.read(part))
                placed.append(part)

        return hook

    def skip_layer(self) -> None:
        """Begin to read the next layer, where the present one will not be placed."""
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
    """Prepare a model that was built without weights for streaming.

    It is built in the dtype it computes in. Only the embeddings of `tokens` are read.

    Raises:
        ModelError: a weight is missing or has another shape, or the model cannot be streamed.
    """
    keep_freed_memory()
    dtype, device = streaming.dtype, streaming.device
    loader = PartLoader(model, weights, checkpoint, dtype=dtype, device=device)
    stored = frozenset(made for group in weights.parameters.values() for made in group)
    compute_buffers(model, stored, device)
    streamed = StreamedModel(model, geometry, loader)
    outside = part_outside_layers(model, geometry, weights, loader)
    with open_embeddings(
        model, weights, checkpoint, tokens, dtype=dtype, device=device
    ) as streamed.embeddings:
        loader.place(outside, loader.read(outside))
        yield streamed


def layer_parts(geometry: ModelGeometry, loader: PartLoader) -> list[ModelPart]:
    """Gather the parameters of each decoder layer.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    return [
        loader.part(lambda name, path=layer.module: name.startswith(f"{path}."))  # type: ignore[misc]
        for layer in geometry.layers
    ]


def part_outside_layers(
    model: PreTrainedModel, geometry: ModelGeometry, weights: WeightSource, loader: PartLoader
) -> ModelPart:
    """Gather the text decoder's parameters outside its layers, without embeddings read by row.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    path, _ = find_text_decoder(model)
    own = tuple(f"{layer.module}." for layer in geometry.layers)
    stored = frozenset(made for group in weights.parameters.values() for made in group)
    left_out = computed_names(model, stored) | {
        f"{name}.weight" for name in embeddings_by_row(model, weights)
    }
    return loader.part(
        lambda name: (
            name.startswith(f"{path}." if path else "")
            and not name.startswith(own)
            and name not in left_out
        )
    )


def open_hidden_states(streaming: Streaming) -> HiddenStateStore:
    """Open the store of hidden states of a streamed run."""
    return HiddenStateStore(ram_limit_bytes=streaming.hidden_ram_bytes, folder=streaming.scratch)


def load_state(store: HiddenStateStore, number: int, device: torch.device) -> LayerState:
    """Load the state of a micro-batch."""
    output, shared = store.get(number, device)
    return LayerState(output=output, shared=shared)
