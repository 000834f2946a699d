"""A model whose decoder layers get their weights one after another, each from one read."""

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
from fp8calib.run.streaming.embeddings import (
    EmbeddingRows,
    compute_buffers,
    embedded_by_row,
    embeddings_by_row,
)
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_steps import LayerState
from fp8calib.run.streaming.weights import HeldTensors, ModelPart, PartedWeights, ReadAhead


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


class StreamedModel:
    """A model whose layers come and go; made by `open_streamed`.

    Attributes:
        model: the model, only parts of which have weights.
        geometry: its geometry.
        device: where it computes.
        embeddings: the embeddings whose rows are in memory, by the name of their weight.
    """

    def __init__(
        self, model: PreTrainedModel, geometry: ModelGeometry, parted: PartedWeights
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.device = torch.device(parted.device)
        self.embeddings: Mapping[str, EmbeddingRows] = {}
        self._begin_next: Callable[[], None] = lambda: None
        self._parted = parted
        self._parts = layer_parts(geometry, parted)

    def layer_modules(self) -> list[nn.Module]:
        """Give the decoder layers themselves."""
        return [self.model.get_submodule(layer.module) for layer in self.geometry.layers]

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

    @contextmanager
    def with_head(self) -> Iterator[None]:
        """Let what lies outside the text decoder get its weights when the model comes to it.

        They are dropped again when the context closes. What does not run (a vision tower) is not
        read.
        """
        inside = set(find_text_decoder(self.model)[1].modules())
        placed: list[ModelPart] = []
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if module not in inside and _has_own(module):
                    hook = self._placing_hook(name, module, placed)
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            stack.callback(self._drop_all, placed)
            yield

    def _drop_all(self, parts: Sequence[ModelPart]) -> None:
        for part in parts:
            self._parted.drop(part)

    def _placing_hook(
        self, name: str, module: nn.Module, placed: list[ModelPart]
    ) -> Callable[..., None]:
        own = {f"{name}.{leaf}" for leaf in dict(module.named_parameters(recurse=False))}

        def hook(*_: object) -> None:
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                part = self._parted.part(lambda parameter: parameter in own)
                self._parted.place(part, self._parted.read(part))
                placed.append(part)

        return hook

    def skip_layer(self) -> None:
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
    keep_freed_memory()
    dtype, device = streaming.dtype, streaming.device
    parted = PartedWeights(model, weights, checkpoint, dtype=dtype, device=device)
    stored = frozenset(made for group in weights.parameters.values() for made in group)
    compute_buffers(model, stored, device)
    streamed = StreamedModel(model, geometry, parted)
    around = part_outside_layers(model, geometry, weights, parted)
    with embedded_by_row(
        model, weights, checkpoint, tokens, dtype=dtype, device=device
    ) as streamed.embeddings:
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


def part_outside_layers(
    model: PreTrainedModel, geometry: ModelGeometry, weights: WeightSource, parted: PartedWeights
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


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def open_store(streaming: Streaming) -> HiddenStateStore:
    """Open the store of hidden states that a way of streaming asks for."""
    return HiddenStateStore(ram_limit_bytes=streaming.hidden_ram_bytes, folder=streaming.scratch)


def load_state(store: HiddenStateStore, number: int, device: torch.device) -> LayerState:
    """Take what a micro-batch has become out of the store."""
    output, shared = store.get(number, device)
    return LayerState(output=output, shared=shared)
