"""The hooks of calibration: a recorder observes the tensors and changes none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedModel

from fp8calib.geometry.model_geometry import Attention, Linear, ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.hooks import (
    ExpertsCall,
    HookedCache,
    open_hooks,
)
from fp8calib.observe.recorder import Recorder
from fp8calib.observe.reductions import (
    observe_expert_down,
    observe_expert_input,
    observe_heads,
)
from fp8calib.recipe import Observe


class InputListener(Protocol):
    """Receives the inputs of linears of each batch; it must not change them."""

    def on_input(self, batch: BatchView, linear: Linear, x: torch.Tensor) -> None:
        """Receive the input of a linear: [..., C]."""

    def on_expert_input(self, batch: BatchView, call: ExpertsCall, hidden: torch.Tensor) -> None:
        """Receive the input of gate and up: [N, C]."""

    def on_expert_down(self, batch: BatchView, call: ExpertsCall, rows: torch.Tensor) -> None:
        """Receive the input of down, its rows sorted by expert: [N * K, C]."""


@contextmanager
def open_calibration_hooks(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    recorder: Recorder,
    observe: Observe,
    *,
    ignored: Collection[str],
    listener: InputListener | None = None,
) -> Iterator[Callable[[], HookedCache]]:
    """Record the tensors of `model` while the context is open.

    Args:
        model: the model, unquantized.
        geometry: its geometry.
        recorder: observes the tensors.
        observe: which tensors it observes: K and V, q, the inputs of linears.
        ignored: paths of modules that it does not observe.
        listener: receives the inputs of linears too, where the recorder observes them.

    Yields:
        A function that makes the cache for one forward pass, with the hook on K and V.
    """
    hooks = CalibrationHooks(recorder, listener)
    config = model.config.get_text_config(decoder=True)
    attentions = geometry.owners()
    unseen = ignored if observe.kv else {each.module for each in attentions.values()}
    with open_hooks(
        model, geometry, hooks, query=observe.query, inputs=observe.inputs, ignored=ignored
    ):
        yield lambda: HookedCache(config, attentions, unseen, hooks)


class CalibrationHooks:
    """Passes the hooked tensors to a recorder."""

    def __init__(self, recorder: Recorder, listener: InputListener | None = None) -> None:
        self._recorder = recorder
        self._listener = listener

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record K and V per head."""
        self._record_heads(attention, Role.K, key, attention.num_kv_heads)
        self._record_heads(attention, Role.V, value, attention.num_kv_heads)
        return key, value

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Record q per head."""
        self._record_heads(attention, Role.Q, query, query.shape[1])
        return query

    def _record_heads(
        self, attention: Attention, role: Role, x: torch.Tensor, num_heads: int
    ) -> None:
        seen = observe_heads(self._recorder.batch, role, x, num_heads)
        self._recorder.record(attention.site(role), seen)

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Record the input of a linear per channel."""
        self._recorder.record_input(Site(linear.module, Role.INPUT), x)
        if self._listener is not None:
            self._listener.on_input(self._recorder.batch, linear, x)
        return x

    def on_expert_input(self, call: ExpertsCall, hidden: torch.Tensor) -> torch.Tensor:
        """Record the input of gate and up per channel and per expert."""
        batch, names = self._recorder.batch, ["up_proj"]
        if call.module.has_gate:
            names = ["gate_proj", "up_proj"]
        sites = [Site(f"{call.path}.{name}", Role.INPUT) for name in names]
        seen = observe_expert_input(batch, sites[0], hidden, call.index, call.num_experts)
        for site in sites:
            self._recorder.record(site, seen)
        if self._listener is not None:
            self._listener.on_expert_input(self._recorder.batch, call, hidden)
        return hidden

    def on_expert_down(self, call: ExpertsCall, rows: torch.Tensor) -> torch.Tensor:
        """Record the input of down per channel and per expert."""
        seen = observe_expert_down(self._recorder.batch, call, rows)
        self._recorder.record(Site(f"{call.path}.down_proj", Role.INPUT), seen)
        if self._listener is not None:
            self._listener.on_expert_down(self._recorder.batch, call, rows)
        return rows
