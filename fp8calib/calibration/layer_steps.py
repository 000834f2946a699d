"""Run one decoder layer at a time through the model's own forward.

What surrounds the layers (embeddings, masks, rotary tables, inputs of single layers) runs again
for each layer and micro-batch, which costs little beside a layer. The layers before the chosen one
do not run: the last of them returns its stored output, earlier ones return NaN. NaN reveals a model
whose layers read more than the output before them. Only that output is stored between layers.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8calib.calibration.decoder import Decoder
from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError

NO_STREAMING_HINT = "it cannot be streamed: leave out --memory, or use a larger machine"


class LayerState(NamedTuple):
    """The state of a micro-batch after a layer."""

    output: Any
    """The output of the layer: a tensor or a tuple of tensors."""
    shared: dict[str, dict[Any, Any]]
    """What layers wrote for later ones into a mapping passed to all of them (shared K and V)."""


class _LayerIsDone(BaseException):
    """Ends a forward pass after the layer. It is not an Exception, so that no model handles it."""


class LayerSteps:
    """Runs single layers of a decoder, whose `forward` it replaces; see `StreamedModel.steps`."""

    def __init__(self, decoder: Decoder, layers: Sequence[nn.Module]) -> None:
        self._decoder = decoder
        self._originals = [layer.forward for layer in layers]
        self._names = [f"{type(layer).__name__} (layer {i})" for i, layer in enumerate(layers)]
        self._chosen = 0
        self._next = 0
        self._before: LayerState | None = None
        self._after: LayerState | None = None
        self._checks = False
        self._unknown: Any = None
        """The output of a layer that is not known: NaN; made once for a batch."""
        self._suspects: list[tuple[int, torch.Tensor]] = []
        """Checked layers, and whether each reads too much."""

    def run_layer(
        self,
        index: int,
        batch: Batch,
        cache: Any,
        before: LayerState | None,
        *,
        checks: bool = False,
    ) -> LayerState:
        """Run layer `index` on a micro-batch.

        `cache` is new, and `before` is the state after the layer before. `checks` finds out whether
        the layer reads more than that; a GPU's answer waits for `check`.

        Raises:
            ModelError: the model does not run its layers one after another.
            CalibrationError: out of memory, or the forward pass failed.
        """
        self._chosen, self._next, self._checks = index, 0, checks
        self._before, self._after, self._unknown = before, None, None
        with suppress(_LayerIsDone):
            self._decoder.run(batch, cache)
        after, self._before, self._after, self._unknown = self._after, None, None, None
        if after is None:
            raise ModelError(
                f"{self._names[index]}: the model's forward ended without running it",
                hint=NO_STREAMING_HINT,
            )
        return after

    def finish(self, batch: Batch, cache: Any, before: LayerState) -> torch.Tensor:
        """Run what follows the last layer, and give the last hidden state: [B, S, C]."""
        self._chosen, self._next, self._checks = len(self._originals), 0, False
        self._before, self._unknown = before, None
        hidden = self._decoder.run(batch, cache)
        self._before = self._unknown = None
        return hidden

    def check(self) -> None:
        """Look at what GPUs found out.

        Raises:
            ModelError: a layer reads more than the output of the layer before it.
        """
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
                return before.output
            if self._unknown is None:
                self._unknown = pytree.tree_map_only(
                    torch.Tensor,
                    lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x,
                    before.output,
                )
            return self._unknown
        if self._checks and before is not None:
            reads_more = _has_nan((args, kwargs)) & ~_has_nan(before.output)
            self._suspects.append((index, reads_more))
            if reads_more.device.type == "cpu":
                self.check()
        # what earlier layers wrote into mappings is restored, and what this one writes is kept
        mappings = {
            name: value
            for name, value in (*enumerate(args), *kwargs.items())
            if isinstance(value, MutableMapping)
        }
        shared = {} if before is None else before.shared
        known = {name: shared.get(str(name), {}) for name in mappings}
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
        self._after = LayerState(output=output, shared=kept)
        raise _LayerIsDone


def _has_nan(tree: Any) -> torch.Tensor:
    found = torch.zeros((), dtype=torch.bool)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found = found | leaf.isnan().any()
    return found
