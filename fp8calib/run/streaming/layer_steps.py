"""Run one decoder layer at a time through the model's own forward.

What surrounds the layers (embeddings, masks, rotary tables, inputs of single layers) runs again
for each layer and micro-batch, which costs little beside a layer. The layers before the chosen one
do not run: the last of them returns its stored output, earlier ones return NaN. NaN reveals a model
whose layers read more than the output before them. Only that output is stored between layers.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError
from fp8calib.run.forward.decoder import Decoder, replaced_forward

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
    """Runs single layers of a decoder; made by `open_steps`."""

    def __init__(self, decoder: Decoder, layers: Sequence[nn.Module]) -> None:
        self._decoder = decoder
        self._originals = [layer.forward for layer in layers]
        self._names = [f"{type(layer).__name__} (layer {i})" for i, layer in enumerate(layers)]
        self._chosen = 0
        self._next = 0
        self._before: LayerState | None = None
        self._after: LayerState | None = None
        self._checks = False
        self._shapes: list[Any] = []
        self._nans: list[Any] = []

    def run_layer(
        self,
        index: int,
        batch: Batch,
        cache: Any,
        before: LayerState | None,
        *,
        checks: bool = False,
        traces: bool = False,
    ) -> LayerState:
        """Run layer `index` on a micro-batch.

        `cache` is new, and `before` is the state after the layer before. `checks` finds out whether
        the layer reads more than that; `traces` records what gradients need.

        Raises:
            ModelError: the model does not run its layers one after another.
            CalibrationError: out of memory, or the forward pass failed.
        """
        self._begin(index, before, checks=checks)
        try:
            self._decoder.run(batch, cache, traces=traces)
        except _LayerIsDone:
            after = self._after
        else:
            after = None
        self._before = self._after = None
        if after is None:
            raise ModelError(
                f"{self._names[index]}: the model's forward ended without running it",
                hint=NO_STREAMING_HINT,
            )
        return after

    def finish(
        self, batch: Batch, cache: Any, before: LayerState, *, traces: bool = False
    ) -> torch.Tensor:
        """Run what follows the last layer, and give the last hidden state: [B, S, C]."""
        self._begin(len(self._originals), before, checks=False)
        hidden = self._decoder.run(batch, cache, traces=traces)
        self._before = None
        return hidden

    def _begin(self, chosen: int, before: LayerState | None, *, checks: bool) -> None:
        self._chosen, self._next = chosen, 0
        self._before, self._after, self._checks = before, None, checks

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of layer `index`."""
        self._require_order(index)
        if index < self._chosen:
            assert self._before is not None  # noqa: S101 -- None only at the first layer
            output = self._before.output
            return output if index == self._chosen - 1 else self._unknown(output)
        if self._checks and self._before is not None:
            self._require_known(args, kwargs)
        shared = _open_shared(self._before, args, kwargs)
        output = self._originals[index](*args, **kwargs)
        self._after = LayerState(output=output, shared=_close_shared(shared, args, kwargs))
        raise _LayerIsDone

    def _unknown(self, output: Any) -> Any:
        """Give a tree like `output`, filled with NaN."""
        leaves, spec = pytree.tree_flatten(output)
        shapes = [
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        if shapes != self._shapes:
            self._shapes, self._nans = shapes, [_nan_like(leaf) for leaf in leaves]
        return pytree.tree_unflatten(self._nans, spec)

    def _require_order(self, index: int) -> None:
        if index != self._next:
            raise ModelError(
                f"{self._names[index]} runs instead of layer {self._next}: the model does not "
                "run each of its layers once, in order",
                hint=NO_STREAMING_HINT,
            )
        self._next += 1

    def _require_known(self, args: Any, kwargs: Any) -> None:
        assert self._before is not None  # noqa: S101 -- the caller looked
        if not _has_nan((args, kwargs)) or _has_nan(self._before.output):
            return
        raise ModelError(
            f"{self._names[self._chosen]} reads more than the output of the layer before it",
            hint=NO_STREAMING_HINT,
        )


@contextmanager
def open_steps(decoder: Decoder, layers: Sequence[nn.Module]) -> Iterator[LayerSteps]:
    """Let `LayerSteps` run the layers while the context is open."""
    steps = LayerSteps(decoder, layers)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.enter_context(replaced_forward(layer, partial(steps.forward, index)))
        yield steps


def _nan_like(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return torch.full_like(leaf, torch.nan)
    return leaf


def _has_nan(tree: Any) -> bool:
    return any(
        bool(leaf.isnan().any())
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    )


def _mappings(args: Any, kwargs: Any) -> Iterator[tuple[str, MutableMapping[Any, Any]]]:
    for name, value in (*((str(i), a) for i, a in enumerate(args)), *kwargs.items()):
        if isinstance(value, MutableMapping):
            yield name, value


_Opened = dict[str, tuple[dict[Any, Any], dict[Any, int]]]


def _open_shared(before: LayerState | None, args: Any, kwargs: Any) -> _Opened:
    """Restore what earlier layers wrote, and record the mappings before the layer runs."""
    opened: _Opened = {}
    for name, mapping in _mappings(args, kwargs):
        known = {} if before is None else before.shared.get(name, {})
        mapping.update(known)
        opened[name] = known, {key: id(value) for key, value in mapping.items()}
    return opened


def _close_shared(opened: _Opened, args: Any, kwargs: Any) -> dict[str, dict[Any, Any]]:
    shared: dict[str, dict[Any, Any]] = {}
    for name, mapping in _mappings(args, kwargs):
        known, seen = opened[name]
        new = {key: value for key, value in mapping.items() if seen.get(key) != id(value)}
        if known or new:
            shared[name] = {**known, **new}
    return shared
