"""Hooks on K and V for generation: the model's own cache stores what the hooks return.

`HookedCache` stores nothing, so it serves one forward pass only. Generation reads its cache again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.topology.find import find_text_decoder, name_cache_argument
from fp8calib.observe.hooks import TensorHooks, find_attention


@contextmanager
def open_cache_hooks(
    model: PreTrainedModel, geometry: ModelGeometry, hooks: TensorHooks
) -> Iterator[None]:
    """Install hooks on K and V before they enter the cache that `model` is called with.

    No other model may run in this process while the context is open.
    """
    with _hooked_updates(geometry, hooks), _always_cached(model):
        yield


@contextmanager
def _hooked_updates(geometry: ModelGeometry, hooks: TensorHooks) -> Iterator[None]:
    attentions = geometry.owners()
    original = Cache.update

    def update(
        self: Any,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        attention = find_attention(attentions, layer_idx, key_states, value_states)
        key, value = hooks.on_kv(attention, key_states, value_states)
        return original(self, key, value, layer_idx, *args, **kwargs)

    Cache.update = update
    try:
        yield
    finally:
        Cache.update = original


class _UnrequestedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """The cache of a call that did not ask for one; it is not returned."""


@contextmanager
def _always_cached(model: PreTrainedModel) -> Iterator[None]:
    """Give every call of the decoder a cache: without one, K and V would bypass the hooks."""
    decoder: nn.Module = find_text_decoder(model)[1]
    argument = name_cache_argument(decoder)
    config = model.config.get_text_config(decoder=True)

    def supply(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get(argument)
        if cache is None:
            is_requested = kwargs.get("use_cache") is not False
            cache = (DynamicCache if is_requested else _UnrequestedCache)(config=config)
        return args, {**kwargs, argument: cache, "use_cache": True}

    def withhold(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(getattr(output, argument, None), _UnrequestedCache):
            setattr(output, argument, None)

    with ExitStack() as stack:
        stack.callback(decoder.register_forward_pre_hook(supply, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(withhold).remove)
        yield
