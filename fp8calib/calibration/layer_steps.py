"""Run one decoder layer at a time through the model's own forward, and store what lies between.

What surrounds the layers (embeddings, masks, rotary tables, inputs of single layers) runs again
for each layer and micro-batch, which costs little beside a layer. The layers before the chosen one
do not run: the last of them returns its stored output, earlier ones return NaN. NaN reveals a model
whose layers read more than the output before them. Only that output is stored between layers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, MutableMapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8calib.calibration.decoder import Decoder, ForwardIsDone
from fp8calib.data.sequences import Batch
from fp8calib.errors import CalibrationError, ModelError
from fp8calib.text import format_gib

NO_STREAMING_HINT = "it cannot be streamed: leave out --memory, or use a larger machine"


LayerState = tuple[Any, dict[str, dict[Any, Any]]]
"""A micro-batch after a layer: the layer's output, a tensor or a tuple of tensors; and what layers
wrote for later ones into a mapping passed to all of them (shared K and V)."""


class LayerSteps:
    """Runs a decoder's layers one at a time: `forward` replaces theirs (`StreamedModel.steps`)."""

    def __init__(self, decoder: Decoder, layers: Sequence[nn.Module]) -> None:
        self._decoder = decoder
        self._originals = [layer.forward for layer in layers]
        self._names = [f"{type(layer).__name__} (layer {i})" for i, layer in enumerate(layers)]
        self._chosen = 0
        self._next = 0
        self._before: Any = None
        """The output of the layer before the chosen one."""
        self._shared: dict[str, dict[Any, Any]] = {}
        self._after: LayerState | None = None
        self._checks = False
        self._unknown: Any = None
        """NaN in place of a layer's output that is not known; made once per batch."""
        self._suspects: list[tuple[int, torch.Tensor]] = []
        """Checked layers, and whether each reads too much."""

    def run_layer(
        self,
        index: int,
        batch: Batch,
        cache: Any,
        before: LayerState | None,
        *,
        checks: bool,
    ) -> LayerState:
        """Run layer `index` on a micro-batch.

        `cache` is empty, and `before` is the state after the layer before. With `checks`, a layer
        that reads more than that is refused: on a CPU here, on a GPU by the next `check`.
        """
        with suppress(ForwardIsDone):
            self._run(index, batch, cache, before, checks=checks)
        after, self._after = self._after, None
        if after is None:
            raise ModelError(
                f"{self._names[index]}: the model's forward ended without running it",
                hint=NO_STREAMING_HINT,
            )
        return after

    def finish(self, batch: Batch, cache: Any, before: LayerState) -> torch.Tensor:
        """Run what follows the last layer, and give the last hidden state: [B, S, C]."""
        return self._run(len(self._originals), batch, cache, before, checks=False)

    def _run(
        self, chosen: int, batch: Batch, cache: Any, before: LayerState | None, *, checks: bool
    ) -> torch.Tensor:
        self._chosen, self._next, self._checks = chosen, 0, checks
        self._before, self._shared = before or (None, {})
        try:
            return self._decoder.run(batch, cache)
        finally:
            self._before = self._unknown = None

    def check(self) -> None:
        """Refuse a layer that reads more than the output of the layer before; waits for a GPU."""
        suspects, self._suspects = self._suspects, []
        for index, reads_more in suspects:
            if bool(reads_more):
                raise ModelError(
                    f"{self._names[index]} reads more than the output of the layer before it",
                    hint=NO_STREAMING_HINT,
                )

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of layer `index`."""
        if index != self._next:
            raise ModelError(
                f"{self._names[index]} runs instead of layer {self._next}: the model does not "
                "run each of its layers once, in order",
                hint=NO_STREAMING_HINT,
            )
        self._next += 1
        before = self._before
        if before is not None and index < self._chosen:
            if index == self._chosen - 1:
                return before
            if self._unknown is None:
                self._unknown = pytree.tree_map_only(
                    torch.Tensor,
                    lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x,
                    before,
                )
            return self._unknown
        if self._checks and before is not None:
            reads_more = _has_nan((args, kwargs)) & ~_has_nan(before)
            self._suspects.append((index, reads_more))
            if reads_more.device.type == "cpu":
                self.check()
        # what earlier layers wrote into mappings is restored, and what this one writes is kept
        mappings = {
            name: value
            for name, value in (*enumerate(args), *kwargs.items())
            if isinstance(value, MutableMapping)
        }
        known = {name: self._shared.get(str(name), {}) for name in mappings}
        for name, mapping in mappings.items():
            mapping.update(known[name])
        seen = {name: dict(mapping) for name, mapping in mappings.items()}
        output = self._originals[index](*args, **kwargs)
        written = {
            str(name): known[name]
            | {key: x for key, x in mapping.items() if seen[name].get(key, mapping) is not x}
            for name, mapping in mappings.items()
        }
        kept = {name: values for name, values in written.items() if values}
        self._after = output, kept
        raise ForwardIsDone


def _has_nan(tree: Any) -> torch.Tensor:
    found = torch.zeros((), dtype=torch.bool)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found = found | leaf.isnan().any()
    return found


class HiddenStateStore:
    """Stores trees of tensors: on the GPU or in memory up to limits, else in files.

    Files have no name: they are gone however the process ends. Their disk space is allocated before
    they are mapped, so that a full disk is an error and not a crash.
    """

    def __init__(self, *, ram_limit_bytes: int, folder: Path, gpu_limit_bytes: int = 0) -> None:
        self.gpu_bytes = self.ram_bytes = self.file_bytes = 0
        self._gpu_limit_bytes = gpu_limit_bytes
        self._ram_limit_bytes = ram_limit_bytes
        self._folder = folder
        self._trees: dict[Hashable, Any] = {}

    def get(self, number: Hashable, device: torch.device) -> Any:
        """Load a tree onto a device; tensors that are there are the stored ones, not copies."""
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: leaf.to(device, non_blocking=True), self._trees[number]
        )

    def put(self, number: Hashable, tree: Any) -> None:
        """Store a copy of a tree of tensors, in place of the one with the same number."""
        leaves, spec = pytree.tree_flatten(tree)
        rooms = pytree.tree_leaves(self._trees.get(number, ()))
        kept = [self._copy(leaf, room) for leaf, room in zip_longest(leaves, rooms[: len(leaves)])]
        self._trees[number] = pytree.tree_unflatten(kept, spec)

    def _copy(self, leaf: Any, room: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # the same strides too: results may round by them
        like = torch.empty_like(leaf, device="meta")
        layout = like.shape, like.dtype, like.stride()
        if isinstance(room, torch.Tensor) and (room.shape, room.dtype, room.stride()) == layout:
            return room.copy_(leaf)
        size_bytes = like.numel() * like.element_size()
        is_gpu = leaf.device.type != "cpu"
        if is_gpu and self.gpu_bytes + size_bytes <= self._gpu_limit_bytes:
            self.gpu_bytes += size_bytes
            return torch.empty_like(like, device=leaf.device).copy_(leaf)
        if self.ram_bytes + size_bytes <= self._ram_limit_bytes:
            self.ram_bytes += size_bytes
            return torch.empty_like(like, device="cpu").copy_(leaf)
        self.file_bytes += size_bytes
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                mapped = torch.from_file(file.name, True, like.numel(), dtype=like.dtype)
        except OSError as error:
            raise CalibrationError(
                f"{self._folder}: no space for more than {format_gib(self.file_bytes)} of hidden "
                f"states: {error.strerror}",
                hint="use fewer --samples, a shorter --seq-len, a larger --memory, or another disk",
            ) from error
        return mapped.as_strided(like.shape, like.stride()).copy_(leaf)
