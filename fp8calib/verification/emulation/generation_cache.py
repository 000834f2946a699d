"""Hooks on K and V where the caller runs the model: its own cache stores what the hooks return.

`HookedCache` stores nothing, so it serves one forward pass only. Generation reads its cache again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from fp8calib.calibration.hooks import TensorHooks, find_attention
from fp8calib.model.shapes import ModelGeometry
from fp8calib.model.topology.find import find_text_decoder, name_cache_argument


class _UnrequestedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """The cache of a call that did not ask for one; it is not returned."""


@contextmanager
def open_cache_hooks(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    hooks: TensorHooks,
    *,
    begin: Callable[[torch.Tensor | None], None],
    end: Callable[[], None],
) -> Iterator[None]:
    """Install hooks on K and V before they enter the cache that `model` is called with.

    Every call of the decoder gets a cache: without one, K and V would bypass the hooks. Only the
    caches of these calls change, so that other models in the process run as before.

    Args:
        model: the model.
        geometry: its geometry.
        hooks: receive K and V.
        begin: called before each pass through the decoder with the tokens that count, bool [B, S];
            None where all do, or where it is not known.
        end: called after each pass.
    """
    decoder: nn.Module = find_text_decoder(model)[1]
    argument = name_cache_argument(decoder)
    config = model.config.get_text_config(decoder=True)
    attentions = geometry.owners()
    originals: list[tuple[Cache, type[Cache]]] = []
    is_open = True

    def make_hooked(kind: type[Cache]) -> type[Cache]:
        """Make the class of a hooked cache: one of its own, since copies of a cache keep it."""

        def update(
            self: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            if is_open:  # a copy of a cache may outlive the context
                attention = find_attention(attentions, layer_idx, key, value)
                key, value = hooks.on_kv(attention, key, value)
            return kind.update(self, key, value, layer_idx, *args, **kwargs)

        members = {"update": update, "hooked_by": originals, "unhooked_class": kind}
        return type(kind.__name__, (kind,), members)

    def supply(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        if cache is None:
            is_requested = kwargs.get("use_cache") is not False
            cache = (DynamicCache if is_requested else _UnrequestedCache)(config=config)
            kwargs = {**kwargs, argument: cache}
        if getattr(cache, "hooked_by", None) is not originals:
            kind = getattr(cache, "unhooked_class", type(cache))
            originals.append((cache, kind))
            cache.__class__ = make_hooked(kind)
        begin(_find_counted(args, kwargs))
        return args, {**kwargs, "use_cache": True}

    def withhold(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        end()
        if isinstance(getattr(output, argument, None), _UnrequestedCache):
            setattr(output, argument, None)

    with ExitStack() as stack:
        stack.callback(decoder.register_forward_pre_hook(supply, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(withhold).remove)
        try:
            yield
        finally:
            is_open = False
            for cache, kind in originals:
                cache.__class__ = kind


def _find_counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Find which tokens of a call are no padding; its mask covers the cached tokens too."""
    tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    mask = kwargs.get("attention_mask")
    if tokens is None or not isinstance(mask, torch.Tensor) or mask.shape != tokens.shape[:2]:
        return None
    return None if bool(mask.all()) else mask.bool()
