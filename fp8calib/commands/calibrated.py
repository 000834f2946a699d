"""The output of a calibration: its files, the checkpoint of its recipe, and its result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from statistics import median
from typing import Any

import torch

from fp8calib.calibration.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationStats,
    save_stats,
)
from fp8calib.calibration.journal import is_checkpoint
from fp8calib.checkpoint.disk import explain_os_error
from fp8calib.checkpoint.output import output_folder
from fp8calib.checkpoint.overlay import CARD_NAME
from fp8calib.commands.calibrate import (
    CalibrateRequest,
    CalibrateResult,
    Coverage,
    ExpertLayer,
    Experts,
    NotQuantized,
)
from fp8calib.commands.command_line import spell_command
from fp8calib.commands.hashes import Known, hash_run
from fp8calib.commands.job import CalibrationJob, UnwrittenError, remove_outputs
from fp8calib.commands.quantize import QuantizeResult
from fp8calib.commands.quantized import make_quantize_result
from fp8calib.commands.recipe_options import decide_query
from fp8calib.commands.result import BeforeAfter
from fp8calib.commands.saturation import compute_position_saturation, compute_saturation
from fp8calib.commands.stats import CalibrationStats as PublicStats
from fp8calib.commands.written import finish_checkpoint, finish_formats
from fp8calib.errors import ExportError, Fp8CalibError, ModelError
from fp8calib.formats.dialect import Attachment
from fp8calib.formats.write import write_formats
from fp8calib.model.kv_bytes import kv_bytes_per_token
from fp8calib.numerics.formats import FP8_FORMATS
from fp8calib.numerics.rules import Fallback
from fp8calib.quantization.calibrated_scales import find_scales, list_unmeasured, split_static
from fp8calib.quantization.plan import make_plan
from fp8calib.quantization.select import select
from fp8calib.quantization.write import write_checkpoint


@contextmanager
def keeping_statistics(
    job: CalibrationJob, stats: CalibrationStats, folder: Path
) -> Iterator[None]:
    """Where a format cannot be written to the working folder, save at least the statistics."""
    try:
        yield
        return
    except OSError as error:
        failed = explain_os_error(error, job.folder)
    except ExportError as error:
        failed = error
    remove_outputs(folder)
    try:
        with output_folder(
            job.folder, owned=job.owned, force=job.force, inputs=[job.model.source.folder]
        ) as kept:
            save_stats(stats, kept / STATS_NAME)
    except Fp8CalibError as error:
        if not any(map(is_checkpoint, folder.iterdir())):
            raise
        raise UnwrittenError(
            error.message,
            hint=f"the run's checkpoints stay in {folder}: fix the cause and add --resume",
        ) from error
    raise ExportError(
        failed.message,
        hint=f"the statistics are saved: `fp8calib export {job.folder / STATS_NAME} --model "
        f"{job.model.name} --format kv-overlay --out DIR` writes scales without another run. "
        f"{failed.hint}".strip(),
    ) from failed


def write_outputs(
    job: CalibrationJob,
    request: CalibrateRequest,
    stats: CalibrationStats,
    cost: Mapping[str, Any],
    folder: Path,
    find_known: Callable[[], Known],
) -> CalibrateResult:
    """Write all output, the report last."""
    recipe = job.recipe
    save_stats(stats, folder / STATS_NAME)
    formats, notes = write_formats(
        *(stats, recipe.formats, folder),
        fmt=FP8_FORMATS[recipe.scales.fp8_dtype],
        tps=recipe.tp,
        source=job.model.checkpoint.stored,
        query=decide_query(recipe, stats)[0],
        fallback=recipe.scales.fallback,
        rule=recipe.scales.rule,
        rules=recipe.scales.rules,
        attachment=Attachment(replaces_scales=request.replace_scales),
    )
    checkpoint = _quantize(job, request, stats, folder)
    checked, cards = finish_formats(
        *(recipe.formats, folder, job.folder, request.model),
        revision=request.revision,
        check=request.check,
    )
    files, warnings, failure = {STATS_NAME, REPORT_NAME, *formats, *cards}, [], ""
    if isinstance(checkpoint, NotQuantized):
        failure = f"{recipe.quantize and recipe.quantize.folder} is not written: {checkpoint.why}"
        warnings = [failure]
    elif checkpoint is not None:
        name = checkpoint.out.name
        files |= {f"{name}/{file}" for file in checkpoint.files}
        warnings = [f"{name}: {e}" for e in (*checkpoint.notes, *checkpoint.describe_dead())]
        checked = (*checked, *checkpoint.checked)
        checkpoint = checkpoint.model_copy(update={"checked": ()})
    # but for the report itself
    places = dict.fromkeys(name.partition("/")[0] for name in sorted(files - {REPORT_NAME}))
    result = make_calibrate_result(
        *(job, stats, cost),
        files=tuple(sorted(files)),
        warnings=(*notes, *warnings),
        checked=checked,
        quantize=checkpoint,
        failure=failure,
        hashes=hash_run(
            None if job.model.is_live else job.model.source.folder,
            job.specs,
            {name: folder / name for name in places},
            find_known(),
        ),
    )
    report = json.dumps(result.to_json(), indent=2, allow_nan=False)
    (folder / REPORT_NAME).write_text(report + "\n", encoding="utf-8")
    return result


def _quantize(
    job: CalibrationJob, request: CalibrateRequest, stats: CalibrationStats, folder: Path
) -> QuantizeResult | NotQuantized | None:
    """Write the recipe's checkpoint, if it has one, under `folder`, with its card.

    Where it cannot be written, the result says why: statistics and scales of a long run are kept.
    """
    asked, settings, checkpoint = job.recipe.quantize, job.quantization, job.model.checkpoint
    if asked is None or settings is None:
        return None
    started, plain_caches = time.monotonic(), asked.kv_cache_dtype_skip_layers
    try:
        selection = job.select_matrices(settings)
        unmeasured = list_unmeasured(stats, *split_static(settings, selection))
        if unmeasured:
            settings = replace(settings, ignore=(*settings.ignore, *unmeasured))
            selection = select(checkpoint, ignore=settings.ignore)
        scales = find_scales(stats, checkpoint, settings, selection, job.recipe.scales.choice)
        plan = make_plan(checkpoint, settings, selection, scales=scales)
        job.reporter.stage("quantizing", plan.data_bytes, unit="bytes")
        written = write_checkpoint(
            *(checkpoint, plan, folder / asked.folder),
            device=torch.device("cpu"),
            advance=job.reporter.advance,
        )
    except (ModelError, ExportError) as error:
        why = "; ".join(filter(None, (error.message, error.hint)))
        return NotQuantized(scheme=settings.schemes.default.name, why=why)
    result = make_quantize_result(
        *(checkpoint, plan, written),
        out=job.folder / asked.folder,
        started=started,
        notes=[  # notes on scales are in the report already
            f"{module}: left unquantized: outside the decoder layers inputs are not observed"
            for module in unmeasured
        ],
        stats=stats,
        plain_caches=plain_caches,
    )
    checked, _ = finish_checkpoint(
        *(folder, job.folder, result.name_schemes(), request.model),
        path=asked.folder,
        revision=request.revision,
        check=request.check,
        plain_caches=plain_caches,
    )
    files = tuple(sorted({*result.files, CARD_NAME}))
    return result.model_copy(update={"files": files, "checked": checked})


def make_calibrate_result(
    job: CalibrationJob,
    stats: CalibrationStats,
    cost: Mapping[str, Any],
    *,
    files: tuple[str, ...] = (),
    warnings: Sequence[str] = (),
    **written: Any,
) -> CalibrateResult:
    """Make the result; `cost` is what the run gave, and `written` has the rest of the fields."""
    model, text, recipe, header = job.model, job.plan, job.recipe, stats.header
    before, after = kv_bytes_per_token(stats.geometry)
    expert_tokens = {
        name.removesuffix(".up_proj"): tokens for name, tokens in stats.expert_counts.items()
    }
    experts = None
    if expert_tokens and not stats.shard:  # another shard may reach those that this one did not
        experts = Experts(
            fallback=recipe.scales.fallback or Fallback.LAYER_MAX,
            layers=tuple(
                ExpertLayer(
                    module=module,
                    min=min(tokens),
                    median=median(tokens),
                    max=max(tokens),
                    never_reached=tuple(i for i, count in enumerate(tokens) if count == 0),
                )
                for module, tokens in sorted(expert_tokens.items())
            ),
        )
    return CalibrateResult(
        stats=PublicStats.of(stats),
        model=model.name,
        command=spell_command(),
        recipe=recipe.name,
        data=text.sources if text else (),
        seq_len=text.seq_len if text else None,
        rows=text.rows.to_json() if text and text.rows else None,
        measured_quantized=model.checkpoint.form,
        architecture=stats.geometry.architecture,
        out=job.out,
        files=files,
        **job.count(),
        **cost,
        dtype=model.dtype,
        dtype_why=model.dtype_why,
        device=model.device,
        engine=header.engine,
        batch_size=job.batch_size,
        rule=str(recipe.scales.rule),
        rules={pattern: str(rule) for pattern, rule in recipe.scales.rules.items()} or None,
        coverage=Coverage(observed=len(stats.sites), skipped=header.skipped),
        saturation=compute_saturation(stats),
        positions=compute_position_saturation(stats),
        expert_tokens=expert_tokens,
        experts=experts,
        kv_bytes_per_token=BeforeAfter(before=before, after=after),
        warnings=(
            *model.describe_decoded(),
            *(text.warnings if text else ()),
            *decide_query(recipe, stats)[1],
            *warnings,
        ),
        versions={**header.versions, "python": python_version()},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model_hash=header.model_fingerprint,
        data_hash=header.data_fingerprint,
        **written,
    )
