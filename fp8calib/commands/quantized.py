"""An FP8 checkpoint that a command writes: the recipe it is from, its files, its result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import find_dtype
from fp8calib.checkpoint.output import list_files
from fp8calib.commands.calibrate import CalibrateRequest
from fp8calib.commands.quantize import QuantizeRequest
from fp8calib.commands.recipe import Recipe, load_recipe
from fp8calib.commands.request import Reporter
from fp8calib.commands.saved import warn_of_tokenizer
from fp8calib.commands.written import finish_checkpoint
from fp8calib.commands.written_result import (
    BeforeAfter,
    LayerScheme,
    QuantizeResult,
    UnquantizedLinear,
)
from fp8calib.errors import RecipeError
from fp8calib.model.kv_bytes import estimate_kv_bytes, kv_bytes_per_token
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.write import Written

RequestT = TypeVar("RequestT", bound=QuantizeRequest)


def apply_recipe(request: RequestT) -> tuple[RequestT, Recipe]:
    """Give a request what it leaves to the recipe that it names, and the recipe or an empty one.

    Raises:
        RecipeError: the recipe is invalid, or has no section `quantize`.
    """
    if not request.names_recipe:
        return request, Recipe(name="")
    recipe = load_recipe(request.scheme)
    asked = recipe.quantize
    if asked is None:
        raise RecipeError(
            f"{request.scheme}: it has no section quantize",
            hint="name a scheme, or a recipe that writes a checkpoint",
        )
    changed = replace(
        request,
        scheme=asked.scheme,
        layer_schemes=request.layer_schemes or asked.layer_schemes,
        ignore=request.ignore or asked.ignore,
    )
    return changed, recipe


def warn_of_quantized(result: QuantizeResult, request: QuantizeRequest, reporter: Reporter) -> None:
    """Warn of what a user should know about a written checkpoint."""
    missing = warn_of_tokenizer(request.model, request.tokenizer, result.files)
    for text in (*result.notes, *result.describe_dead(), *missing):
        reporter.warn(text)


def list_layer_schemes(plan: QuantizePlan) -> tuple[LayerScheme, ...]:
    """List the patterns that give linears another scheme, with the number of these linears."""
    settings = plan.settings
    counts = Counter(settings.pattern_of(matrix.module) for matrix in plan.selection.quantized)
    return tuple(
        LayerScheme(pattern=pattern, scheme=name, linears=counts[pattern])
        for pattern, name in settings.layer_schemes.items()
    )


def finish_quantized(
    request: QuantizeRequest | CalibrateRequest,
    checkpoint: Checkpoint,
    plan: QuantizePlan,
    written: Written,
    *,
    folder: Path,
    target: Path | None = None,
    path: str = ".",
    started: float,
    notes: Sequence[str] = (),
    stats: CalibrationStats | None = None,
    plain_caches: Sequence[int] = (),
) -> QuantizeResult:
    """Look at a written checkpoint as `check` does, write its card, and make the result.

    Args:
        request: names the model, and whether engines are asked.
        checkpoint: what it was made from.
        plan: what was written.
        written: the files.
        folder: the output folder where it is now.
        target: the output folder where it will be; None if it is there.
        path: of the checkpoint in the output folder.
        started: the value of time.monotonic() at the start.
        notes: on its scales.
        stats: the statistics of K and V.
        plain_caches: the layers whose KV cache a recipe wants to stay in 16 bits.
    """
    scheme, others = plan.settings.scheme.name, list_layer_schemes(plan)
    names = dict.fromkeys([scheme, *(each.scheme for each in others)])
    checked = finish_checkpoint(
        *(folder, target or folder, ", ".join(names), request.model),
        path=path,
        revision=request.revision,
        check=request.check,
        plain_caches=plain_caches,
    )
    size = (
        kv_bytes_per_token(stats.geometry)
        if stats is not None and plan.has_kv
        else estimate_kv_bytes(plan.config, find_dtype(plan.config))
    )
    return QuantizeResult(
        out=(target or folder) / path,
        files=list_files(folder / path),
        scheme=scheme,
        layer_schemes=others,
        format=plan.settings.dialect.name,
        bytes=BeforeAfter(before=checkpoint.total_size_bytes, after=plan.data_bytes),
        duration_s=time.monotonic() - started,
        resumed=written.resumed,
        quantized=tuple(matrix.module for matrix in plan.selection.quantized),
        left=tuple(
            UnquantizedLinear(module=item.module, why=item.why)
            for item in plan.selection.unquantized
        ),
        dead=written.all_zero,
        has_kv_scales=plan.has_kv,
        notes=(*notes, *(f"{name}: not copied: {why}" for name, why in plan.skipped.items())),
        kv_bytes_per_token=None
        if size is None or plain_caches
        else BeforeAfter(before=size[0], after=size[1]),
        checked=checked,
    )
