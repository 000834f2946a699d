"""Hold a model in memory under emulation, for callers that run it themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import WeakSet

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.decoder import check_runnable
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import Fp8CalibWarning, UsageError
from fp8calib.formats.table import ScaleTable
from fp8calib.model.live_model import LiveCheckpoint, borrowed, check_live_model
from fp8calib.model.load import LoadedModel
from fp8calib.model.prepared import prepare
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS, Fp8Format
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.verification.candidates import (
    Target,
    build_kv_candidate,
    build_opened,
    build_scheme,
    build_unscaled,
    check_sites,
    open_candidate,
    open_stats,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.generation_cache import open_cache_hooks
from fp8calib.verification.emulation.weights import changed_weights
from fp8calib.verification.report import SCALE_ONE

_EMULATED: WeakSet[LoadedModel] = WeakSet()
"""The models that are under emulation."""


@contextmanager
def emulate(
    model: LoadedModel,
    candidate: str | Path | ScaleTable | CalibrationStats | Candidate,
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
            that needs no statistics; `scale-1.0`; or what is in memory already.
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
        check_runnable(model)
        checkpoint = LiveCheckpoint(model)
        prepared = prepare(model, checkpoint)
        fingerprint = fingerprint_model(checkpoint.load_config(), checkpoint)
        target = Target(checkpoint=checkpoint, fingerprint=fingerprint, geometry=prepared.geometry)
        made = _make_candidate(candidate, model, target, numerics, FP8_FORMATS[fp8_dtype])
        check_sites(made, target.geometry)
        if made.weights:
            checkpoint.hold()
        for note in made.notes:
            warnings.warn(f"{made.name}: {note}", Fp8CalibWarning, stacklevel=3)
        hooks = EmulationHooks(made.quantizers, made.reads)
        measured = (hooks.damage, hooks.weight_scales)
        originals, geometry = prepared.weights, prepared.geometry
        stack.enter_context(changed_weights(model, made.weights, originals, *measured))
        stack.enter_context(open_emulation_hooks(model, geometry, hooks))
        # The caller's own cache stores the quantized K and V.
        begin, end = hooks.begin_call, hooks.end_batch
        stack.enter_context(open_cache_hooks(model, geometry, hooks, begin=begin, end=end))
        _EMULATED.add(model)
        stack.callback(_EMULATED.discard, model)
        yield made


def _make_candidate(
    given: object, model: LoadedModel, target: Target, numerics: Numerics, fmt: Fp8Format
) -> Candidate:
    """Make the candidate that a caller describes.

    Raises:
        UsageError: the scheme needs statistics, the path does not exist, or it is none of these.
        ModelError: the candidate cannot be read, or is of another model.
    """
    if isinstance(given, Candidate):
        return given
    if isinstance(given, ScaleTable):
        return build_kv_candidate("scales", given, numerics, origin="given")
    if given == SCALE_ONE:
        return build_unscaled(SCALE_ONE, target.geometry, fmt, numerics)
    if isinstance(given, str) and given in SCHEMES:
        scheme = SCHEMES[given]
        return build_scheme(given, scheme, target, model, numerics, fmt=fmt, stats=None)
    if isinstance(given, CalibrationStats):
        opened = open_stats("statistics", given, target)
    elif isinstance(given, str | Path):
        opened = open_candidate(str(given), target, numerics)
    else:
        raise UsageError(f"candidate: neither a path nor scales, found {type(given).__name__}")
    table = opened.make_table(fmt) if opened.checkpoint is None else None
    return build_opened(opened, model, target, numerics, table)
