"""Hold a model in memory under emulation, for callers that run it themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import Cache, DynamicCache

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.hooks import find_attention
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import Fp8CalibWarning, UsageError
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.live_model import LiveCheckpoint, borrowed, check_live_model
from fp8calib.model.load import LoadedModel
from fp8calib.model.prepared import prepare
from fp8calib.model.topology import find_text_decoder, name_cache_argument
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.verification.candidates import Target, fit_to_model
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, emulated
from fp8calib.verification.open_candidates import Scales, open_candidate
from fp8calib.verification.report import SCALE_ONE

_EMULATED: WeakSet[LoadedModel] = WeakSet()
"""The models that are under emulation."""


@contextmanager
def emulate(
    model: LoadedModel,
    candidate: str | Path | ScaleTable | RunStats | Candidate,
    engine: str = "vllm",
    *,
    fp8_dtype: str = E4M3FN.name,
) -> Iterator[Candidate]:
    """Let a model in memory compute as an engine does with FP8, while the context is open.

    `model(...)` and `model.generate(...)` then quantize what the engine quantizes: the KV cache,
    weights, inputs. Prompts read the quantized cache too, as decoded tokens do. Afterwards the
    model is as before; other models always are. Weights that change are copied to the memory of the
    host. Notes on what the emulation does not cover are warnings (`Fp8CalibWarning`).

    Args:
        model: the unquantized model; its parameters are in memory.
        candidate: a path of statistics, of scales or of an FP8 checkpoint; the name of a scheme
            that needs no statistics; `scale-1.0`; or statistics, scales or the result of
            `calibrate` in memory.
        engine: the engine to emulate, NAME or NAME==VERSION.
        fp8_dtype: the FP8 format of statistics and of scale 1.0.

    Yields:
        What is emulated, with its description and notes.

    Raises:
        UsageError: the engine, the scheme or the format is unknown, the path does not exist, or the
            model is under emulation already.
        ModelError: the model or the candidate is not supported, or they do not belong together.
        VerificationError: a weight cannot be replaced.
    """
    numerics = find_emulated(engine)[1]
    if fp8_dtype not in FP8_FORMATS:
        raise UsageError(f"fp8_dtype {fp8_dtype}: not one of {', '.join(FP8_FORMATS)}")
    check_live_model(model)
    if model in _EMULATED:
        raise UsageError(
            f"{type(model).__name__}: the model is under emulation already",
            hint="close the other context first, or load the model twice",
        )
    with ExitStack() as stack:
        stack.enter_context(borrowed(model))
        checkpoint = LiveCheckpoint(model)
        prepared = prepare(model, checkpoint)
        target = Target(
            prepared=prepared,
            fingerprint=fingerprint_model(checkpoint.load_config(), checkpoint),
            numerics=numerics,
            fmt=FP8_FORMATS[fp8_dtype],
        )
        given = getattr(candidate, "stats", candidate)  # of the result of `calibrate`
        if isinstance(candidate, Candidate):
            made = fit_to_model(candidate, target)
        elif given == SCALE_ONE:
            made = open_candidate(None, target)
        elif isinstance(given, str) and given in SCHEMES:
            made = open_candidate(None, target, scheme=given)
        elif isinstance(given, Scales | ScaleTable):
            made = open_candidate(given, target)
        else:
            raise UsageError(f"candidate: neither a path nor scales, found {type(given).__name__}")
        if made.weights:
            checkpoint.hold()
        for note in made.notes:
            warnings.warn(f"{made.name}: {note}", Fp8CalibWarning, stacklevel=3)
        hooks = EmulationHooks(made)
        stack.enter_context(emulated(prepared, hooks))
        stack.enter_context(_open_cache_hooks(model, prepared.geometry, hooks))
        _EMULATED.add(model)
        stack.callback(_EMULATED.discard, model)
        yield made


@contextmanager
def _open_cache_hooks(
    model: LoadedModel, geometry: ModelGeometry, hooks: EmulationHooks
) -> Iterator[None]:
    """Install hooks on K and V before they enter the cache that the caller's model is called with.

    `HookedCache` stores nothing, so it serves one forward pass only. Generation reads its cache
    again. Every call of the decoder gets a cache: without one, K and V would bypass the hooks. Only
    the caches of these calls change, while they run.
    """
    decoder: nn.Module = find_text_decoder(model)[1]
    argument = name_cache_argument(decoder)
    config = model.config.get_text_config(decoder=True)
    attentions = geometry.owners()
    hooked: list[tuple[Cache, type[Cache]]] = []

    def supply(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        if cache is None:
            cache = DynamicCache(config=config)
            cache.is_unrequested = kwargs.get("use_cache") is False
            kwargs = {**kwargs, argument: cache}
        kind = type(cache)

        def update(
            self: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            attention = find_attention(attentions, layer_idx, key, value)
            key, value = hooks.on_kv(attention, key, value)
            return kind.update(self, key, value, layer_idx, *args, **kwargs)

        hooks.begin_call(_find_counted(args, kwargs))
        hooked.append((cache, kind))
        cache.__class__ = type(kind.__name__, (kind,), {"update": update})
        return args, {**kwargs, "use_cache": True}

    def withhold(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        for cache, kind in hooked:
            cache.__class__ = kind
        hooked.clear()
        hooks.end_batch()
        if getattr(getattr(output, argument, None), "is_unrequested", False):
            setattr(output, argument, None)

    with ExitStack() as stack:
        stack.callback(decoder.register_forward_pre_hook(supply, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(withhold, always_call=True).remove)
        yield


def _find_counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Find which tokens of a call are no padding; its mask covers the cached tokens too."""
    tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    mask = kwargs.get("attention_mask")
    if tokens is None or not isinstance(mask, torch.Tensor) or mask.shape != tokens.shape[:2]:
        return None
    return None if bool(mask.all()) else mask.bool()
