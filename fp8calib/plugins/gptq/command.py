"""Write an FP8 checkpoint whose weights GPTQ rounds."""

from __future__ import annotations

from pathlib import Path

from fp8calib.calibration.processes import open_process_group
from fp8calib.commands.recipe import ScaleOptions
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.written import check_written
from fp8calib.errors import UsageError
from fp8calib.jobs.card import CardJob, add_card
from fp8calib.jobs.function import as_function
from fp8calib.jobs.quantization.planned import QuantizeTask, resolve_request
from fp8calib.jobs.recipe_options import apply_quantize_recipe
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.saved import saved_model, warn_of_tokenizer
from fp8calib.jobs.stats import read_stats
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.plugins.gptq.job import open_gptq, plan_gptq, run_gptq
from fp8calib.plugins.gptq.request import GptqRequest
from fp8calib.plugins.gptq.result import GptqResult


def run(
    request: GptqRequest, reporter: Reporter, process_rank: ProcessRank = ALONE
) -> GptqResult | RunPlan | None:
    """Quantize a checkpoint; a dry run gives the plan, other processes than the first one nothing.

    Raises:
        UsageError: an option is invalid, the folder is in use, or no class runs the model.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        RecipeError: the recipe that the scheme names is invalid.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed, or gave NaN or infinity.
        ExportError: the statistics do not fit, no engine can load the checkpoint, or the disk
            cannot hold it.
    """
    recipe = None
    if request.names_recipe:
        request, recipe = apply_quantize_recipe(request)
    _check_options(request)
    # Blocks have powers of two: vLLM's DeepGEMM would round the weights of other scales again, to
    # nearest, which undoes a part of what GPTQ gains.
    asked = resolve_request(request, power_of_two=True, is_calibrated=True)
    stats, inputs = (None, []) if request.stats is None else read_stats(request.stats)
    with (
        saved_model(request.model, Path(request.out), request.tokenizer) as model,
        open_process_group(process_rank) as group,
    ):
        task = QuantizeTask(
            request=request,
            model=model,
            asked=asked,
            scales=ScaleOptions() if recipe is None else recipe.scales,
            stats=stats,
            inputs=inputs,
            reporter=reporter,
        )
        with open_gptq(task, request, group) as opened:
            if request.dry_run:
                return plan_gptq(opened)
            found = run_gptq(opened, None if recipe is None else recipe.quantize)
    if found is None:
        return None
    made, rounded = found
    result = GptqResult(**dict(made), rounded=rounded)
    if request.check:
        result = result.model_copy(update={"checked": check_written(task.out, task.out)})
    cards = CardJob(
        written=task.out,
        target=task.out,
        model=request.model,
        revision=request.revision,
        checked=result.checked,
    )
    result = add_card(cards, result)
    files = warn_of_tokenizer(request.model, request.tokenizer, result.files)
    for text in (*result.notes, *result.describe_dead(), *files):
        reporter.warn(text)
    return result


def _check_options(request: GptqRequest) -> None:
    """Refuse options of `quantize` that have no use here.

    Raises:
        UsageError: naming the option.
    """
    if request.dequantize:
        raise UsageError(
            "--dequantize: GPTQ needs an unquantized MODEL",
            hint="use the model that this one was made from",
        )


gptq = as_function("gptq", GptqRequest, run)
