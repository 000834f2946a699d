"""Write an FP8 checkpoint whose weights GPTQ rounds."""

from __future__ import annotations

from pathlib import Path

from fp8calib.calibration.processes import open_process_group
from fp8calib.commands.quantized import apply_recipe, warn_of_quantized
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.saved import saved_model
from fp8calib.commands.stats import read_stats
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.plugins.gptq.job import GptqTask, open_gptq, plan_gptq, run_gptq
from fp8calib.plugins.gptq.request import GptqRequest
from fp8calib.plugins.gptq.result import GptqResult
from fp8calib.quantization.settings import make_settings


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
    request, recipe = apply_recipe(request)
    # Blocks have powers of two: vLLM's DeepGEMM would round the weights of other scales again, to
    # nearest, which undoes a part of what GPTQ gains.
    settings = make_settings(
        *(request.scheme, request.layer_schemes, request.ignore),
        dialect=request.dialect,
        drafters=request.drafters,
        power_of_two=True,
    )
    stats, inputs = (None, []) if request.stats is None else read_stats(request.stats)
    with (
        saved_model(request.model, Path(request.out), request.tokenizer) as model,
        open_process_group(process_rank) as group,
    ):
        task = GptqTask(
            request=request,
            model=model,
            settings=settings,
            rules=recipe.scales.choice,
            stats=stats,
            inputs=inputs,
            reporter=reporter,
        )
        with open_gptq(task, group) as opened:
            if request.dry_run:
                return plan_gptq(opened)
            plain = recipe.quantize.kv_cache_dtype_skip_layers if recipe.quantize else ()
            result = run_gptq(opened, plain)
    if result is not None:
        warn_of_quantized(result, request, reporter)
    return result


gptq = as_function("gptq", GptqRequest, run)
