"""A quantized checkpoint: its options resolved, planned, and written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import find_dtype
from fp8calib.checkpoint.resumable_folder import remove_progress_file
from fp8calib.commands.quantize import QuantizeRequest, QuantizeResult, UnquantizedLinear
from fp8calib.commands.recipe import Quantize, ScaleOptions
from fp8calib.commands.result import BeforeAfter, LayerScheme
from fp8calib.engines.engine import Engine
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.errors import UsageError, cut_list
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.registry import find_written, list_written
from fp8calib.formats.kv.parse_names import find_spelling
from fp8calib.jobs.quantization.servable import replay_plan, require_servable
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.saved import find_model
from fp8calib.model.device import choose_device
from fp8calib.model.kv_bytes import estimate_kv_bytes, kv_bytes_per_token
from fp8calib.numerics.encode import decode_rows, encode_rows
from fp8calib.numerics.formats import SMALLEST_SCALE
from fp8calib.numerics.schemes import (
    list_without_calibration,
)
from fp8calib.quantization import quantize as writing
from fp8calib.quantization.calibrated_scales import check_stats_model, find_scales
from fp8calib.quantization.ignored import span_layers, spell_options
from fp8calib.quantization.layer_schemes import OPTION, LayerSchemes, make_layer_schemes
from fp8calib.quantization.matrices import SUFFIX, Matrix
from fp8calib.quantization.plan import (
    NO_SCALES,
    PlanSettings,
    QuantizePlan,
    make_plan,
    select_linears,
)
from fp8calib.quantization.shard_writer import WeightCodes
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.decoded import DecodedCheckpoint, open_dequantized
from fp8calib.quantization.weight_reader import read_matrix
from fp8calib.quantization.weight_scales import part_amax, scale_parts, spread_scales

_SAMPLED, _SAMPLED_ROWS = 8, 64
"""The weights, and the rows of each, on which a second rounding is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeTask:
    """A request whose options are resolved."""

    request: QuantizeRequest
    model: str
    """A folder or Hub id, also of a model that is in memory."""
    asked: PlanSettings
    scales: ScaleOptions
    """How statistics become scales: as a recipe says it."""
    stats: CalibrationStats | None
    """For the scales of inputs, K and V."""
    inputs: Sequence[Path]
    """Files that the output must not replace."""
    reporter: Reporter

    @property
    def out(self) -> Path:
        """The folder of the checkpoint."""
        return Path(self.request.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A checkpoint and what will be made of it."""

    checkpoint: Checkpoint
    plan: QuantizePlan
    notes: tuple[str, ...] = ()
    """On its scales."""
    kept_codes: WeightCodes | None = None
    """The codes that are not computed again; those of MXFP8 that stays MXFP8."""

    def describe(
        self,
        written: writing.Written,
        *,
        out: Path,
        started: float,
        stats: CalibrationStats | None,
        served: Quantize | None,
    ) -> QuantizeResult:
        """Make the result of the written checkpoint.

        `started` is the value of time.monotonic() at the start; `served` is how a recipe wants the
        checkpoint to be served.
        """
        plan, skipped = self.plan, self.plan.skipped.items()
        size = (
            kv_bytes_per_token(stats.geometry)
            if stats is not None and plan.has_kv
            else estimate_kv_bytes(plan.config, find_dtype(plan.config))
        )
        has_plain_caches = served is not None and served.kv_cache_dtype_skip_layers
        return QuantizeResult(
            out=out,
            files=written.files,
            scheme=plan.settings.schemes.default.name,
            layer_schemes=list_layer_schemes(plan),
            format=plan.settings.dialect.name,
            bytes=BeforeAfter(before=self.checkpoint.total_size_bytes, after=plan.data_bytes),
            duration_s=time.monotonic() - started,
            resumed=written.resumed,
            quantized=tuple(matrix.module for matrix in plan.selection.quantized),
            left=tuple(
                UnquantizedLinear(module=item.module, why=item.why)
                for item in plan.selection.unquantized
            ),
            dead=written.all_zero,
            has_kv_scales=plan.has_kv,
            notes=(*self.notes, *(f"{name}: not copied: {why}" for name, why in skipped)),
            kv_bytes_per_token=None
            if size is None or has_plain_caches
            else BeforeAfter(before=size[0], after=size[1]),
        )


def list_layer_schemes(plan: QuantizePlan) -> tuple[LayerScheme, ...]:
    """List the patterns that give linears another scheme, with the number of these linears."""
    schemes = plan.settings.schemes
    counts = Counter(schemes.pattern_of(matrix.module) for matrix in plan.selection.quantized)
    return tuple(
        LayerScheme(pattern=pattern, scheme=name, linears=counts[pattern])
        for pattern, name in schemes.names.items()
    )


def resolve_recipe(asked: Quantize) -> PlanSettings:
    """Resolve what a recipe asks: the checkpoint has the format of compressed-tensors."""
    return PlanSettings(
        schemes=make_layer_schemes(asked.scheme, asked.layer_schemes),
        dialect=COMPRESSED_TENSORS,
        ignore=asked.ignore,
    )


def resolve_request(
    request: QuantizeRequest, *, power_of_two: bool = False, is_calibrated: bool = False
) -> PlanSettings:
    """Resolve what `quantize` is asked.

    `power_of_two` means that scales of blocks are powers of two, and `is_calibrated` that input
    scales are measured without `--stats`.

    Raises:
        UsageError: a name is unknown, or the options contradict each other.
    """
    layer_schemes = request.layer_schemes or {}
    schemes = make_layer_schemes(request.scheme, layer_schemes, power_of_two=power_of_two)
    dialect = find_written(request.dialect, schemes.default)
    if layer_schemes and not dialect.has_groups:
        others = (each.name for each in list_written() if each.has_groups)
        raise UsageError(
            f"{OPTION}: --format {dialect.name} has one scheme for all linears",
            hint=f"leave it out, or write {', '.join(others)}",
        )
    options = {f"--scheme {schemes.default.name}": schemes.default}
    options |= {f"{OPTION} {pattern}={each.name}": each for pattern, each in schemes.by_pattern}
    static = next((option for option, each in options.items() if each.has_static_inputs), None)
    if static is not None and request.stats is None and not is_calibrated:
        raise UsageError(
            f"{static}: its input scales come from calibration",
            hint="pass the --stats of `fp8calib calibrate --recipe w8a8-static`, or choose a "
            f"scheme that needs no calibration: {', '.join(list_without_calibration())}",
        )
    return PlanSettings(schemes=schemes, dialect=dialect, ignore=tuple(request.ignore or ()))


@contextmanager
def open_planned(task: QuantizeTask) -> Iterator[Planned]:
    """Open a model and plan its checkpoint, before a weight is read.

    Raises:
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        ExportError: the statistics do not fit, or no engine can load the checkpoint.
    """
    request, asked = task.request, task.asked
    folder = find_model(task.model, request.revision)
    opened = open_dequantized(folder) if request.dequantize else Checkpoint.open(folder)
    with opened as checkpoint:
        plan, notes = _plan_checkpoint(checkpoint, asked, task.stats, task.scales)
        if not request.allow_unservable and (note := require_servable(plan, checkpoint.folder)):
            task.reporter.warn(note)
        kept = None
        if isinstance(checkpoint, DecodedCheckpoint):
            kept = checkpoint.keep_codes(asked.schemes)
            others = [each for each in plan.selection.quantized if kept is None or each not in kept]
            rounded = _note_second_rounding(checkpoint, others, asked.schemes)
            notes = (*notes, *rounded, *_note_changes(checkpoint, plan))
        yield Planned(checkpoint=checkpoint, plan=plan, notes=notes, kept_codes=kept)


def _plan_checkpoint(
    checkpoint: Checkpoint,
    asked: PlanSettings,
    stats: CalibrationStats | None,
    options: ScaleOptions,
) -> tuple[QuantizePlan, tuple[str, ...]]:
    """Plan a checkpoint of an open model; gives notes on its scales too."""
    check_unquantized(checkpoint)
    selection = select_linears(checkpoint, asked)
    scales = NO_SCALES
    if stats is not None:
        check_stats_model(stats, checkpoint)
        scales = find_scales(stats, checkpoint, asked, selection, options)
    return make_plan(checkpoint, asked, selection, scales=scales), scales.notes


def replay_settings(
    folder: Path, asked: PlanSettings, stats: CalibrationStats | None, engines: Sequence[Engine]
) -> tuple[QuantizePlan, Mapping[str, EngineReport], str]:
    """Plan the checkpoint of a folder, and replay it for engines (`replay_plan`).

    Raises:
        ModelError: the model cannot be quantized.
        ExportError: the statistics do not fit, or the checkpoint cannot be written so.
    """
    with Checkpoint.open(folder) as checkpoint:
        plan, _ = _plan_checkpoint(checkpoint, asked, stats, ScaleOptions())
        return plan, *replay_plan(plan, folder, [engine.key for engine in engines])


def _note_second_rounding(
    checkpoint: DecodedCheckpoint, matrices: Sequence[Matrix], schemes: LayerSchemes
) -> Iterator[str]:
    """Measure on a few weights what rounding FP8 codes to MXFP8 costs."""
    again = [
        each
        for each in matrices
        if each.source in checkpoint.weights and schemes.of(each.module).is_mx
    ]
    sample = again[:: max(1, len(again) // _SAMPLED)]
    if not sample:
        return
    errors = []
    for matrix in sample:
        values = read_matrix(checkpoint, matrix, range(min(matrix.shape[0], _SAMPLED_ROWS)))
        scheme = schemes.of(matrix.module)
        scale = scale_parts(part_amax(values, scheme), scheme)
        spread = spread_scales(scale, matrix.shape, scheme)[: len(values)]
        rounded = decode_rows(encode_rows(values, spread)).mul_(spread)
        errors.append(float((rounded - values).norm() / values.norm().clamp(min=SMALLEST_SCALE)))
    loss = 100 * fmean(errors)
    yield (
        f"the weights are FP8 already, and MXFP8 rounds them a second time: {loss:.1f} % of their "
        f"norm, measured on {len(sample)} linears; from the unquantized model it rounds once"
    )


def _note_changes(checkpoint: DecodedCheckpoint, plan: QuantizePlan) -> Iterator[str]:
    """Name what another checkpoint of FP8 weights does not have as its source has it."""
    decoded, selection = checkpoint.weights, plan.selection
    more = [each.module for each in selection.quantized if each.source not in decoded]
    if more:
        patterns = dict.fromkeys(map(span_layers, more))
        yield (
            f"in 16 bits in MODEL, and quantized now: {cut_list(more)}; to leave them: "
            f"{spell_options(patterns)}"
        )
    fewer = [
        each.module
        for each in selection.unquantized
        if {each.module, each.module + SUFFIX} & decoded.keys()
    ]
    if fewer:
        yield f"in FP8 in MODEL, and not quantized now: {cut_list(fewer)}"
    if not plan.has_kv and any(map(find_spelling, checkpoint.stored.tensors)):
        yield (
            "the KV scales of MODEL are left out; `fp8calib extract-kv-scales --quantized-model "
            "MODEL --model OUT` adds them to a copy of the new checkpoint"
        )


def write_planned(
    task: QuantizeTask, planned: Planned, rounded: WeightCodes | None, *, device: str
) -> writing.Written:
    """Write the planned checkpoint; codes in `rounded` are not computed again.

    Raises:
        UsageError: the folder is in use.
        ExportError: the disk cannot hold the output.
    """
    request = task.request
    if request.resume and (found := find_finished_checkpoint(task, planned.plan)) is not None:
        return found
    task.reporter.stage("quantizing", planned.plan.data_bytes, unit="bytes")
    return writing.quantize(
        planned.checkpoint,
        planned.plan,
        task.out,
        device=torch.device("cpu" if device == "auto" else choose_device(device)),
        advance=task.reporter.advance,
        resume=request.resume,
        force=request.force,
        inputs=task.inputs,
        rounded=rounded,
    )


def find_finished_checkpoint(task: QuantizeTask, plan: QuantizePlan) -> writing.Written | None:
    """Look for the checkpoint of this plan that an earlier run finished."""
    if not writing.is_finished(task.out, plan):
        return None
    remove_progress_file(task.out)
    task.reporter.say(f"{task.out} is finished already")
    return writing.Written(files=writing.list_files(task.out), all_zero=(), resumed=())
