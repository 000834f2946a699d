"""A whole model under emulation: whoever calls or generates with it meets FP8, the KV cache too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from fp8calib.geometry import ModelGeometry
from fp8calib.model.topology import text_decoder
from fp8calib.observe.seams import tapped, tapped_caches
from fp8calib.sites import Role
from fp8calib.verify.emulate import EmulatingTaps, Emulation
from fp8calib.verify.weights import Originals, changed_weights


@contextmanager
def emulated_model(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    emulation: Emulation,
    *,
    originals: Originals,
) -> Iterator[None]:
    """Hold `model` under `emulation` while the context is open; its callers need not know.

    Where `emulated` runs batches through the decoder and keeps no cache, here the caller's own
    cache keeps K and V as quantized: `model(...)` and `model.generate(...)` both go through it.
    No other model may run in this process meanwhile.

    Args:
        model: the unquantized model.
        geometry: its geometry.
        emulation: what to quantize.
        originals: where the unquantized weights are read from when the context closes.
    """
    taps = EmulatingTaps(emulation.quantizers)
    roles = {site.role for site in emulation.quantizers}
    with ExitStack() as stack:
        if emulation.weights:
            stack.enter_context(changed_weights(model, emulation.weights, originals, taps.damage))
        seams = tapped(model, geometry, taps, query=Role.Q in roles, inputs=Role.INPUT in roles)
        stack.enter_context(seams)
        stack.enter_context(tapped_caches(geometry, taps))
        stack.enter_context(_always_cached(model))
        stack.callback(taps.end_batch)
        yield


class _UnaskedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """The cache of a caller that wants none."""


@contextmanager
def _always_cached(model: PreTrainedModel) -> Iterator[None]:
    """Give every call of the decoder a cache: without one, K and V would go around the seam."""
    decoder: nn.Module = text_decoder(model)[1]
    config = model.config.get_text_config(decoder=True)

    def supply(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is None:
            is_asked = kwargs.get("use_cache") is not False
            cache = (DynamicCache if is_asked else _UnaskedCache)(config=config)
        return args, {**kwargs, "past_key_values": cache, "use_cache": True}

    def withhold(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(getattr(output, "past_key_values", None), _UnaskedCache):
            output.past_key_values = None

    with ExitStack() as stack:
        stack.callback(decoder.register_forward_pre_hook(supply, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(withhold).remove)
        yield
