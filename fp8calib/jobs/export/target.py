"""The model that scales are exported for: unquantized, quantized already, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.dialects.dialect import NO_ATTACHMENT, Attachment
from fp8calib.dialects.metadata import describe_attention, explain_other_attention
from fp8calib.dialects.quantized_model import QuantizedModel, find_quantized
from fp8calib.dialects.registry import find_dialect
from fp8calib.errors import ModelError, UsageError
from fp8calib.geometry.model_geometry import find_difference
from fp8calib.jobs.export.attachment import (
    describe_attachment,
    refuse_options,
    relate_to_quantized,
)
from fp8calib.jobs.stats import GivenStats
from fp8calib.quantization.calibrated_scales import check_stats_model
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.int4 import is_int4_source
from fp8calib.recipe import Recipe
from fp8calib.requests.export import ExportRequest
from fp8calib.stats.calibration_stats import CalibrationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTask:
    """What to export."""

    request: ExportRequest
    recipe: Recipe
    model: str | None
    """The folder or Hub id, also of a model that is in memory."""

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.request.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """The model that scales are written for."""

    source: Checkpoint | None
    """None without --model."""
    stats: CalibrationStats
    """For a quantized model, with its own names of tensors."""
    attachment: Attachment = NO_ATTACHMENT
    quantized: QuantizedModel | None = None

    def describe(self) -> Iterator[str]:
        """Describe what a user should know about how the scales are added."""
        if self.source is not None:
            yield from describe_attachment(self.attachment, self.source, self.stats.geometry)


@contextmanager
def open_target(task: ExportTask, given: GivenStats) -> Iterator[ExportTarget]:
    """Open the model of an export, and refuse what does not fit the statistics.

    Raises:
        UsageError: options are of no use, or contradict the model.
        ModelError: the model cannot be read, or is another one.
    """
    request, stats = task.request, given.stats
    if task.model is None:
        refuse_options(request)
        yield ExportTarget(source=None, stats=stats)
        return
    from fp8calib.model.load import find_folder  # noqa: PLC0415 -- imports transformers

    with Checkpoint.open(find_folder(task.model, None)) as checkpoint:
        if request.with_weights and is_int4_source(checkpoint):
            _refuse_overlays(task.recipe.formats, checkpoint)
            yield ExportTarget(source=checkpoint, stats=stats)
            return
        quantized = None if request.with_weights else find_quantized(checkpoint)
        if quantized is None:
            refuse_options(request)
            if request.with_weights:
                check_unquantized(checkpoint)
            check_stats_model(stats, checkpoint)
            attachment = Attachment(replaces_scales=request.replace_scales)
            yield ExportTarget(source=checkpoint, stats=stats, attachment=attachment)
            return
        stats = _adopt_names(stats, checkpoint)
        attachment = relate_to_quantized(
            given.name, stats.origin, checkpoint, stats.geometry, request
        )
        yield ExportTarget(
            source=checkpoint, stats=stats, quantized=quantized, attachment=attachment
        )


def _adopt_names(stats: CalibrationStats, checkpoint: Checkpoint) -> CalibrationStats:
    """Give statistics the names that a quantized checkpoint of the same model has.

    Raises:
        ModelError: its config cannot be used, or it has another shape.
    """
    from fp8calib.model.geometry_from_config import read_geometry  # noqa: PLC0415 -- transformers

    geometry = read_geometry(checkpoint.folder, checkpoint.load_config())
    recorded = describe_attention(stats.geometry)
    difference = explain_other_attention(recorded, geometry)
    if difference := difference or find_difference(geometry, stats.geometry):
        raise ModelError(
            f"{checkpoint.folder} was not made from the model these statistics were calibrated on: "
            f"{difference}",
            hint="name a checkpoint that was quantized from the calibrated model",
        )
    return replace(stats, header=stats.header.model_copy(update={"geometry": geometry}))


def _refuse_overlays(formats: Iterable[str], checkpoint: Checkpoint) -> None:
    names = [name for name in formats if find_dialect(name).needs_model]
    if names:
        raise UsageError(
            f"--format {names[0]}: an overlay needs the unquantized model, and the weights of "
            f"{checkpoint.folder} are int4",
            hint="export the overlay separately, with the unquantized --model",
        )
