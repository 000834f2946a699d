"""Write an FP8 checkpoint shard by shard."""

from __future__ import annotations

import time
from pathlib import Path

from fp8calib.commands.written import check_written
from fp8calib.jobs.card import CardJob, add_card
from fp8calib.jobs.function import as_function
from fp8calib.jobs.quantization.planned import (
    QuantizeTask,
    open_planned,
    resolve_request,
    write_planned,
)
from fp8calib.jobs.quantization.report import QuantizationOutcome, make_quantize_result
from fp8calib.jobs.recipe_options import apply_quantize_recipe
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.saved import saved_model, warn_of_tokenizer
from fp8calib.jobs.stats import drop_kv, read_stats
from fp8calib.recipe import ScaleOptions
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.results.quantize import QuantizeResult


def run(request: QuantizeRequest, reporter: Reporter) -> QuantizeResult:
    """Quantize a checkpoint.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        RecipeError: the recipe that the scheme names is invalid.
        ExportError: the statistics do not fit, no engine can load the checkpoint, or the disk
            cannot hold it.
    """
    recipe = None
    if request.names_recipe:
        request, recipe = apply_quantize_recipe(request)
    asked = resolve_request(request)
    stats, inputs = (None, []) if request.stats is None else read_stats(request.stats)
    if stats is not None and recipe is not None and not recipe.observe.kv:
        stats = drop_kv(stats)
    with saved_model(request.model, Path(request.out), request.tokenizer) as model:
        task = QuantizeTask(
            request=request,
            model=model,
            asked=asked,
            scales=ScaleOptions() if recipe is None else recipe.scales,
            stats=stats,
            inputs=inputs,
            reporter=reporter,
        )
        outcome = _quantize(task)
        served = None if recipe is None else recipe.quantize
        result = make_quantize_result(outcome, served)
        if request.check:
            checked = check_written(
                outcome.folder,
                outcome.out,
                plain_caches=() if served is None else served.kv_cache_dtype_skip_layers,
            )
            result = result.model_copy(update={"checked": checked})
        cards = CardJob(
            written=outcome.folder,
            target=outcome.out,
            model=request.model,
            revision=request.revision,
            checked=result.checked,
        )
        result = add_card(cards, result)
    files = warn_of_tokenizer(request.model, request.tokenizer, result.files)
    for text in (*result.notes, *result.describe_dead(), *files):
        reporter.warn(text)
    return result


def _quantize(task: QuantizeTask) -> QuantizationOutcome:
    with open_planned(task) as planned:
        started = time.monotonic()
        written = write_planned(task, planned, planned.kept_codes, device=task.request.device)
        return planned.finish(task, written, started)


quantize = as_function("quantize", QuantizeRequest, run)
