"""Hooks that observe, and may replace, the tensors of a running model.

A context manager installs the hooks and removes them; no module keeps any state. K and V are hooked
where a server stores them (`Cache.update`), and q where attention receives it. Inputs of linears
are hooked by forward pre-hooks, and those of experts by transformers' experts interface.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.modeling_utils import AttentionInterface

from fp8calib.errors import CalibrationError
from fp8calib.model.geometry import Attention, Linear, ModelGeometry

Attend = Callable[..., Any]
"""Runs attention in place of the model's function, and returns what that returns.

It receives the attention, the function, and what the function would: its module, q [B, H, S, D],
K and V with KV heads instead, the mask or None, and further options as one mapping.
"""


class TensorHooks(Protocol):
    """What the hooks do: each method receives tensors and returns their replacements.

    Shapes: B batch, S sequence, H heads, D head size, N tokens, K experts per token, C channels.
    """

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Handle K and V before they enter the cache: [B, H, S, D] each."""

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Handle q before it enters attention: [B, H, S, D]."""

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Handle the input of a linear: [..., C]."""

    def on_expert_input(
        self, linears: Sequence[Linear], index: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Handle the input of gate, if there is one, and up: [N, C].

        `index` has the experts that each token is routed to: [N, K].
        """

    def on_expert_down(
        self, linear: Linear, index: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Handle the input of down, its rows sorted by expert: [N * K, C]."""


class HookedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A cache that passes K and V through the hooks and stores neither.

    States of linear-attention layers are stored, because the model reads them back.
    """

    def __init__(
        self,
        config: Any,
        attentions: Mapping[int, Attention],
        ignored: Collection[str],
        hooks: TensorHooks,
    ) -> None:
        super().__init__(config=config)
        self._attentions = attentions
        self._ignored = ignored
        self._hooks = hooks

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002 -- the signature of the base class
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as the hooks return them ([B, H, S, D] each)."""
        attention = find_attention(self._attentions, layer_idx, key_states, value_states)
        if attention.module in self._ignored:
            return key_states, value_states
        return self._hooks.on_kv(attention, key_states, value_states)


def find_attention(
    attentions: Mapping[int, Attention], layer_idx: int, key: torch.Tensor, value: torch.Tensor
) -> Attention:
    """Return the attention of a layer that caches K and V [B, H, S, D]."""
    attention, expected = attentions.get(layer_idx), "no K/V"
    sizes = key.shape[-1], value.shape[-1]
    if attention is not None:
        has_heads = all(x.shape[1] % attention.num_kv_heads == 0 for x in (key, value))
        if has_heads and sizes == (attention.k_head_dim, attention.v_head_dim):
            return attention
        known = f"{attention.k_head_dim} (K) and {attention.v_head_dim} (V)"
        expected = f"{attention.num_kv_heads} of sizes {known}"
    raise CalibrationError(
        f"layer {layer_idx} caches {key.shape[1]} KV heads of sizes {sizes[0]} (K) and {sizes[1]} "
        f"(V) where the topology found {expected}"
    )


@contextmanager
def open_hooks(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    hooks: TensorHooks,
    *,
    query: bool,
    inputs: bool,
    ignored: Collection[str] = (),
    attend: Attend | None = None,
) -> Iterator[None]:
    """Install all hooks except those on K and V (`HookedCache`) while the context is open.

    Modules that are `ignored` get none. `attend` runs attention where q is hooked; None leaves it
    to the model.
    """
    modules = dict(model.named_modules())
    attentions = {
        modules[attention.module]: attention
        for _, attention in geometry.attentions()
        if attention.module not in ignored
    }
    experts = defaultdict[nn.Module, list[Linear]](list)

    def run_attention(
        function: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        attention = attentions.get(module)
        if attention is not None:
            query = hooks.on_query(attention, query)
        if attention is None or attend is None:
            return function(module, query, key, value, attention_mask, **kwargs)
        return attend(attention, function, module, query, key, value, attention_mask, kwargs)

    def run_experts(
        function: Callable[..., Any],
        module: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if module not in experts:
            return function(module, hidden, index, *args, **kwargs)
        *inputs, down = experts[module]
        hidden = hooks.on_expert_input(inputs, index, hidden)
        on_down = partial(hooks.on_expert_down, down, index)
        with ExitStack() as stack:
            if module.has_gate:
                apply_gate = module._apply_gate
                module._apply_gate = lambda gate_up: on_down(apply_gate(gate_up))
                stack.callback(delattr, module, "_apply_gate")
            else:
                hook = module.act_fn.register_forward_hook(
                    lambda _module, _args, output: on_down(output)
                )
                stack.callback(hook.remove)
            # this implementation sorts rows by expert
            return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, index, *args, **kwargs)

    with ExitStack() as stack:
        if query:
            # The lookup is wrapped, since transformers chooses the mask by the registered name.
            stack.enter_context(wrapped_lookup(AttentionInterface, run_attention))
        if inputs:
            stack.enter_context(wrapped_lookup(ExpertsInterface, run_experts))
        for _, linear in geometry.linears() if inputs else ():
            path = linear.runner
            if path not in ignored and linear.num_experts:
                experts[modules[path]].append(linear)
            elif path not in ignored:
                see = partial(hooks.on_input, linear)
                stack.enter_context(changed_input(modules[path], see))
        yield


@contextmanager
def changed_input(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Pass the first argument of a module through `change` while the context is open."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def wrapped_lookup(interface: Any, hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook` instead of the functions of an interface; it receives the function first."""
    original, is_open = interface.get_interface, True

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = original(self, name, default)
        return partial(hook, function) if is_open else function

    interface.get_interface = get_interface
    try:
        yield
    finally:
        is_open = False
        if interface.get_interface is get_interface:  # else one that was opened later has it
            interface.get_interface = original
