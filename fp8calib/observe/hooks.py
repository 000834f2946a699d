"""Where tensors of a running model can be looked at or replaced.

Every seam is opened by a context manager and closed by it, whatever happens inside; no module
keeps anything. K and V are met where a server stores them (`Cache.update`), q where attention
receives it, the inputs of linears in forward pre-hooks, those of experts in transformers' experts
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.modeling_utils import AttentionInterface

from fp8calib.errors import CalibrationError
from fp8calib.geometry.model_geometry import Attention, Linear, ModelGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCall:
    """One call of the experts of a layer."""

    path: str
    """Path of the experts' module."""
    module: Any
    block: int
    """How many consecutive channels of the cut axis share one stored amax."""
    index: torch.Tensor
    """The experts each token goes to: [N, K]."""

    @property
    def num_experts(self) -> int:
        """How many experts the layer has."""
        return int(self.module.down_proj.shape[0])


class TensorHooks(Protocol):
    """What is done at the seams: each method is given tensors and says what goes on in their place.

    Shapes: B batch, S sequence, H heads, D head size, N tokens, K experts a token goes to, C
    channels.
    """

    def tap_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take K and V on their way into the cache: [B, H, S, D] each."""

    def tap_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Take q on its way into attention: [B, H, S, D]."""

    def tap_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Take the input of a linear: [..., C]."""

    def tap_expert_input(self, call: ExpertsCall, hidden: torch.Tensor) -> torch.Tensor:
        """Take the input of gate and up: [N, C]."""

    def tap_expert_down(self, call: ExpertsCall, rows: torch.Tensor) -> torch.Tensor:
        """Take the input of down, its rows sorted by expert: [N * K, C]."""


class TappedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A cache that shows what a server would store to the taps and keeps none of it.

    States of linear-attention layers are kept, as the model reads them back.
    """

    def __init__(
        self,
        config: Any,
        attentions: Mapping[int, Attention],
        ignored: Collection[str],
        taps: TensorHooks,
    ) -> None:
        super().__init__(config=config)
        self._attentions = attentions
        self._ignored = ignored
        self._taps = taps

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002 -- the base class passes layer options on
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand back what the taps make of K and V ([B, H, S, D] each)."""
        attention = find_attention(self._attentions, layer_idx, key_states, value_states)
        if attention.module in self._ignored:
            return key_states, value_states
        return self._taps.tap_kv(attention, key_states, value_states)


def find_attention(
    attentions: Mapping[int, Attention], layer_idx: int, key: torch.Tensor, value: torch.Tensor
) -> Attention:
    """Give the attention of a layer that caches K and V [B, H, S, D].

    Raises:
        CalibrationError: the layer has none, or one of other shapes.
    """
    attention = attentions.get(layer_idx)
    if attention is None or not _fits(attention, key, value):
        raise _unexpected(attention, layer_idx, key, value)
    return attention


def _fits(attention: Attention, key: torch.Tensor, value: torch.Tensor) -> bool:
    has_heads = all(x.shape[1] % attention.num_kv_heads == 0 for x in (key, value))
    sizes = key.shape[-1], value.shape[-1]
    return has_heads and sizes == (attention.k_head_dim, attention.v_head_dim)


def _unexpected(
    attention: Attention | None, layer_idx: int, key: torch.Tensor, value: torch.Tensor
) -> CalibrationError:
    expected = "no K/V"
    if attention is not None:
        sizes = f"{attention.k_head_dim} (K) and {attention.v_head_dim} (V)"
        expected = f"{attention.num_kv_heads} of sizes {sizes}"
    return CalibrationError(
        f"layer {layer_idx} caches {key.shape[1]} KV heads of sizes {key.shape[-1]} (K) and "
        f"{value.shape[-1]} (V) where the topology found {expected}"
    )


def own_attentions(geometry: ModelGeometry) -> dict[int, Attention]:
    """Map layer index to attention, for the layers that store K and V of their own."""
    return {
        layer.index: attention
        for layer, attention in geometry.attentions()
        if attention.producer is None
    }


@contextmanager
def tapped(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    taps: TensorHooks,
    *,
    query: bool,
    inputs: bool,
    ignored: Collection[str] = (),
) -> Iterator[None]:
    """Open every seam but the cache (`TappedCache`) while the context is open.

    Args:
        model: the model, unquantized.
        geometry: its geometry.
        taps: what to do with the tensors.
        query: open the seam of q.
        inputs: open those of the inputs of linears and experts.
        ignored: paths of modules to leave alone.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        if query:
            stack.enter_context(_tap_queries(modules, geometry, taps, ignored))
        if inputs:
            stack.enter_context(_tap_linears(modules, geometry, taps, ignored))
            stack.enter_context(_tap_experts(modules, geometry, taps, ignored))
        yield


# --- linears -----------------------------------------------------------------------------------


@contextmanager
def _tap_linears(
    modules: Mapping[str, nn.Module],
    geometry: ModelGeometry,
    taps: TensorHooks,
    ignored: Collection[str],
) -> Iterator[None]:
    with ExitStack() as stack:
        for _, linear in geometry.linears():
            if not linear.num_experts and linear.module not in ignored:
                hook = _input_hook(linear, taps)
                handle = modules[linear.module].register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _input_hook(linear: Linear, taps: TensorHooks) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (taps.tap_input(linear, args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": taps.tap_input(linear, kwargs["input"])}

    return hook


# --- queries -----------------------------------------------------------------------------------


@contextmanager
def _tap_queries(
    modules: Mapping[str, nn.Module],
    geometry: ModelGeometry,
    taps: TensorHooks,
    ignored: Collection[str],
) -> Iterator[None]:
    attentions = {
        modules[attention.module]: attention
        for _, attention in geometry.attentions()
        if attention.module not in ignored
    }

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if (attention := attentions.get(module)) is not None:
                query = taps.tap_query(attention, query)
            return function(module, query, *args, **kwargs)

        return attend

    # The lookup is wrapped, not a function of its own registered: masks go by the registered name.
    with _wrapped_lookup(AttentionInterface, wrap):
        yield


@contextmanager
def _wrapped_lookup(
    interface: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    original = interface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(original(self, name, default))

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


# --- experts -----------------------------------------------------------------------------------


@contextmanager
def _tap_experts(
    modules: Mapping[str, nn.Module],
    geometry: ModelGeometry,
    taps: TensorHooks,
    ignored: Collection[str],
) -> Iterator[None]:
    blocks: dict[nn.Module, tuple[str, int]] = {}
    for _, linear in geometry.linears():
        path = linear.module.rpartition(".")[0]
        if linear.num_experts and path not in ignored:
            blocks[modules[path]] = (path, linear.expert_block)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if module not in blocks:
                return function(module, hidden, index, *args, **kwargs)
            path, block = blocks[module]
            call = ExpertsCall(path=path, module=module, block=block, index=index)
            hidden = taps.tap_expert_input(call, hidden)
            with _tapped_down(call, taps):
                return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, index, *args, **kwargs)

        return run

    with _wrapped_lookup(ExpertsInterface, wrap):
        yield


@contextmanager
def _tapped_down(call: ExpertsCall, taps: TensorHooks) -> Iterator[None]:
    """Tap the input of down, which `grouped_mm` computes with rows sorted by expert."""
    module = call.module
    if not module.has_gate:
        hook = module.act_fn.register_forward_hook(
            lambda _module, _args, output: taps.tap_expert_down(call, output)
        )
        try:
            yield
        finally:
            hook.remove()
        return
    apply_gate = module._apply_gate
    module._apply_gate = lambda gate_up: taps.tap_expert_down(call, apply_gate(gate_up))
    try:
        yield
    finally:
        del module._apply_gate
