"""Write an FP8 checkpoint with weights rounded by GPTQ: calibrate layer by layer, round, write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fp8calib.calibration.calibrate import run_calibration
from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.job import CalibrationJob
from fp8calib.calibration.origin import REPORT_NAME, STATS_NAME, CalibrationOrigin
from fp8calib.calibration.stats_header import Observe
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.hub import find_folder
from fp8calib.checkpoint.output import check_output
from fp8calib.commands.check_planned import require_servable
from fp8calib.commands.model import describe_run, plan_text, prepare_run_model, work_folder
from fp8calib.commands.model_folder import saved_model
from fp8calib.commands.quantize import (
    QuantizeResult,
    finish_quantized,
    list_layer_schemes,
    open_settings,
)
from fp8calib.commands.quantize import describe as describe_checkpoint
from fp8calib.commands.recipe import Recipe, apply_request
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.stats import read_stats
from fp8calib.errors import ModelError, UsageError, cut_list
from fp8calib.model.device import choose_device
from fp8calib.model.load import open_source
from fp8calib.model.prepared import UnfilledModelError
from fp8calib.numerics.rules import PLAIN_RULES, ScaleRules
from fp8calib.numerics.schemes import list_without_calibration, round_block_scales
from fp8calib.plugins.gptq.core import DAMPING, SCALE_STEPS, searches_scales
from fp8calib.plugins.gptq.hessians import HELD_EVERY, LENGTH_POWER
from fp8calib.plugins.gptq.input_map import map_inputs
from fp8calib.plugins.gptq.layer_rounding import CODES, Rounding, count_code_bytes
from fp8calib.plugins.gptq.request import GptqRequest
from fp8calib.plugins.gptq.rounded_codes import GPTQ, RoundedCodes, RoundedLinear
from fp8calib.quantization.calibrated_scales import check_stats_model, find_scales, split_static
from fp8calib.quantization.ignored import span_layers, spell_options
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.plan import (
    NO_SCALES,
    CalibratedScales,
    QuantizePlan,
    make_plan,
    select_linears,
)
from fp8calib.quantization.select import Selection, check_unquantized
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.write import find_finished, write_checkpoint
from fp8calib.text import Block, Line

_SHOWN = 5
_SMALLEST = "the smallest that saturate nothing"
_SEARCHED = f"{_SMALLEST}, or up to twice as large: the best of {SCALE_STEPS} for each row"


class GptqResult(QuantizeResult):
    """The checkpoint that was written, and how each linear was rounded."""

    rounded: tuple[RoundedLinear, ...]


def run(request: GptqRequest, reporter: Reporter) -> GptqResult | RunPlan:
    """Quantize a checkpoint; a dry run gives the plan.

    Raises:
        UsageError: an option is invalid, the folder is in use, or no class runs the model.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        RecipeError: the recipe that the scheme names is invalid.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed, or gave NaN or infinity.
        ExportError: the statistics do not fit, no engine can load the checkpoint, or the disk
            cannot hold it.
    """
    settings, recipe = open_settings(request)
    # Blocks have powers of two: vLLM's DeepGEMM would round the weights of other scales again, to
    # nearest, which undoes a part of what GPTQ gains.
    by_pattern = {key: round_block_scales(each) for key, each in settings.by_pattern.items()}
    scheme = round_block_scales(settings.scheme)
    settings = replace(settings, scheme=scheme, by_pattern=by_pattern)
    stats, inputs = (None, []) if request.stats is None else read_stats(request.stats)
    out, rounded = Path(request.out), list[RoundedLinear]()
    with (
        saved_model(request.model, out, request.tokenizer, warn=reporter.warn) as name,
        Checkpoint.open(find_folder(name, request.revision)) as checkpoint,
    ):
        check_unquantized(checkpoint)
        selection = select_linears(checkpoint, settings)
        job, rounding = _make_job(request, name, checkpoint, settings, selection, reporter)
        static = split_static(settings, selection)[0]
        if stats is not None:
            check_stats_model(stats, checkpoint)
        else:
            _check_measured(job, static)

        def plan(measured: RunStats | None) -> QuantizePlan:
            return _plan_checkpoint(
                *(job, settings, selection, recipe.scales.choice if recipe else PLAIN_RULES),
                given=stats,
                measured=measured,
                static=static,
            )

        expected = plan(None)
        if not request.allow_unservable:
            note, _ = require_servable(expected, checkpoint.folder)
            if note:
                reporter.warn(note)
        if request.dry_run:
            return _describe_run(job, expected, out)
        started = time.monotonic()
        if request.resume and (written := find_finished(out, expected)) is not None:
            reporter.say(f"{out} is finished already")
        else:
            check_output(out, expected.names, request.force, inputs=[job.model.source.folder])
            for text in (*job.mode.describe(), job.model.describe()):
                reporter.say(text)
            work = out.with_name(f"{out.name}.rounding")
            with (
                work_folder(
                    *(job, work, reporter),
                    owned=frozenset((STATS_NAME, REPORT_NAME)),
                    resume=request.resume,
                    force=request.force,
                    check_old=rounding.check_same,
                ) as journal,
                closing(RoundedCodes(journal.folder / CODES)) as codes,
            ):
                measured, _ = run_calibration(job, journal)
                expected = plan(measured)
                reporter.stage("quantizing", expected.data_bytes, unit="bytes")
                written = write_checkpoint(
                    *(checkpoint, expected, out),
                    device=torch.device("cpu"),
                    advance=reporter.advance,
                    resume=request.resume,
                    force=request.force,
                    inputs=inputs,
                    rounded=codes,
                )
                rounded = _list_rounded(job, selection, codes)
            shutil.rmtree(work, ignore_errors=True)
        made = finish_quantized(
            *(request, checkpoint, expected, written),
            folder=out,
            started=started,
            geometry=job.model.prepared.geometry,
        )
    result = GptqResult(**dict(made), rounded=tuple(rounded))
    for text in (*result.notes, *map(str, result.dead)):
        reporter.warn(text)
    return result


def describe(result: GptqResult, request: GptqRequest) -> Iterator[Block]:
    """Describe how the weights were rounded, the checkpoint, and what engines do with it."""
    rounded = result.rounded
    chosen = [item for item in rounded if item.rounding == GPTQ]
    gains = [
        item.gptq_db - item.nearest_db
        for item in chosen
        if item.gptq_db is not None and item.nearest_db is not None
    ]
    gained = f": {median(gains):.1f} dB less output error in the median" if gains else ""
    yield Line(f"{len(chosen)} of {len(rounded)} linears rounded by GPTQ{gained}")
    for why in dict.fromkeys(item.why for item in rounded if item.why):
        names = [item.module for item in rounded if item.why == why]
        yield Line(f"  rounded to nearest ({why}): {cut_list(names, _SHOWN)}")
    if raised := [item.module for item in rounded if (item.damping or 0) > DAMPING]:
        shown = cut_list(raised, _SHOWN)
        yield Line(f"  more damping, for a Hessian that was not positive: {shown}")
    yield from describe_checkpoint(result, request)


def _make_job(
    request: GptqRequest,
    name: str,
    checkpoint: Checkpoint,
    settings: PlanSettings,
    selection: Selection,
    reporter: Reporter,
) -> tuple[CalibrationJob, Rounding]:
    """Make the job that observes what static scales need, and rounds, beside the output."""
    weights = any(each.has_static_inputs for each in settings.schemes)
    observe = Observe(kv=False, query=False, inputs=True, weights=weights)
    recipe, rows = apply_request(Recipe(name="gptq", observe=observe, formats=()), request)
    try:
        source = open_source(
            name, revision=request.revision, trust_remote_code=request.trust_remote_code
        )
        model = prepare_run_model(
            *(source, checkpoint, recipe),
            name=name,
            device=choose_device(request.device),
            dtype=request.dtype,
            memory=request.memory,
        )
    except UnfilledModelError:
        raise  # of no use for any rounding
    except ModelError as error:
        raise UsageError(
            f"GPTQ runs the model, which is not possible here: {error.message}",
            hint="`fp8calib quantize ...` needs neither text nor a class of the model",
        ) from error
    text = plan_text(
        *(source, recipe.data), rows=rows, part="calibrate", tokenizer=request.tokenizer
    )
    if (count := len(text.sequences)) < HELD_EVERY:
        raise UsageError(
            f"GPTQ needs at least {HELD_EVERY} sequences, and the data gives {count}: "
            f"one of {HELD_EVERY} is held back to measure the error",
            hint="use more --samples"
            if count == recipe.data.samples
            else "use more text, or a shorter --seq-len",
        )
    for warning in text.warnings:
        reporter.warn(warning)
    out = Path(request.out)
    rounding = Rounding(
        checkpoint=checkpoint,
        settings=settings,
        matrices=selection.quantized,
        inputs=map_inputs(model.prepared, selection.quantized)[0],
        num_sequences=len(text.sequences),
    )
    job = CalibrationJob(
        model=model,
        observe=recipe.observe,
        recipe_name=recipe.name,
        plan=text,
        asked_batch_size=recipe.data.batch_size,
        out=out.with_name(f"{out.name}.rounding"),
        progress=reporter,
        make_recorder=rounding.open_recorder,
        layer_bytes=rounding.estimate_bytes(),
        why_streamed="layer by layer: each layer is rounded after the text has run through it",
    )
    return job, rounding


def _check_measured(job: CalibrationJob, static: Collection[Matrix]) -> None:
    """Refuse linears of a static scheme whose inputs would not be measured, before the run."""
    _, missing = map_inputs(job.model.prepared, static)
    if not missing:
        return
    patterns = dict.fromkeys(map(span_layers, missing))
    raise UsageError(
        f"no input of {next(iter(missing))} can be measured for a static scale",
        hint=f"leave such linears unquantized: {spell_options(patterns)}; or choose a scheme that "
        f"needs no input scales: {', '.join(list_without_calibration())}",
    )


def _describe_run(job: CalibrationJob, expected: QuantizePlan, out: Path) -> RunPlan:
    """Describe what would be run and written."""
    schemes: Any = list(list_layer_schemes(expected))
    linears = expected.selection.quantized
    return describe_run(
        job.model,
        job.mode,
        job.plan,
        **job.count(),
        out=str(out),
        writes=sorted(expected.names),
        scheme=expected.settings.scheme.name,
        **({"layer_schemes": schemes} if schemes else {}),
        linears=len(linears),
        output_size_bytes=expected.size_bytes,
        work_disk_bytes=count_code_bytes(linears),
    )


def _list_rounded(
    job: CalibrationJob, selection: Selection, codes: RoundedCodes
) -> list[RoundedLinear]:
    """List how every quantized linear was rounded, in the order of the checkpoint."""
    known = {rounded.module: rounded for rounded in codes.report()}
    _, reasons = map_inputs(job.model.prepared, selection.quantized)
    return [
        known.get(matrix.module)
        or RoundedLinear(
            module=matrix.module, rounding="nearest", why=reasons.get(matrix.module, "not reached")
        )
        for matrix in selection.quantized
    ]


def _plan_checkpoint(
    job: CalibrationJob,
    settings: PlanSettings,
    selection: Selection,
    rules: ScaleRules,
    *,
    given: RunStats | None,
    measured: RunStats | None,
    static: Collection[Matrix],
) -> QuantizePlan:
    """Plan the checkpoint with the scales of the given statistics, or of those that were measured.

    Input scales that are still to be measured are 1, at their places.
    """
    measures_inputs = bool(static) and given is None
    stats = given or (measured if measures_inputs else None)
    if stats is not None:
        scales = find_scales(stats, job.model.checkpoint, settings, selection, rules)
    elif measures_inputs:
        ones = {matrix.module: torch.tensor(1.0) for matrix in static}
        scales = CalibratedScales(inputs=ones, kv={})
    else:
        scales = NO_SCALES
    header, text = job.header, job.plan
    if scales.origin is None or measures_inputs:
        origin = CalibrationOrigin(
            model=header.model_fingerprint,
            data=header.data_fingerprint,
            text_start=header.text_start,
        )
        scales = replace(scales, origin=origin)
    assert text is not None  # noqa: S101 -- gptq runs data
    searched = {searches_scales(scheme) for scheme in settings.schemes}
    how = _SEARCHED if searched == {True} else _SMALLEST
    if len(searched) > 1:
        how = f"per channel: {_SEARCHED}; others: {_SMALLEST}"
    rounding = {
        "rounding": GPTQ,
        "data": text.fingerprint,
        "sequences": len(text.sequences),
        # one sequence of this many is not in the Hessians; on these the better rounding is chosen
        "held_back": HELD_EVERY,
        "damping": DAMPING,
        "order": "by falling diagonal of the Hessian",
        "tokens": f"scaled to the power {LENGTH_POWER} of their length",
        "scales": how,
        # the scales of inputs were measured on the same text, which determines them
        "measures_inputs": measures_inputs,
    }
    return make_plan(
        *(job.model.checkpoint, settings, selection),
        scales=scales,
        rounding=rounding,
        measures_inputs=measures_inputs,
    )


gptq = as_function("gptq", GptqRequest, run)
