"""The FP8 weights of every rank that `export --with-weights` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.calibration.calibration_origin import explain_difference
from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.recipe import Recipe
from fp8calib.errors import ModelError
from fp8calib.formats.compute import compute_linear_scales
from fp8calib.formats.table import ScaleTable
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.projections import LinearWeight, read_linears
from fp8calib.model.shapes import Linear, ModelGeometry, find_difference
from fp8calib.model.topology.find import find_geometry
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import FP8_FORMATS
from fp8calib.quantization.rfc.compound_scales import adopt_scales
from fp8calib.quantization.rfc.rank_weights import write_rank_weights
from fp8calib.quantization.sources.int4 import Int4Source, ScaleSpread, is_int4_source


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Weights to write, with their scales for every tensor-parallel degree."""

    tables: Mapping[int, ScaleTable]
    notes: tuple[str, ...]
    _source: WeightSource

    def write(self, folder: Path) -> list[str]:
        """Write a file for every rank of every degree, and return their names.

        Raises:
            ExportError: a file cannot be written.
        """
        return [
            name
            for table in self.tables.values()
            for name in write_rank_weights(table, self._read(table), folder)
        ]

    def _read(self, table: ScaleTable) -> Iterator[LinearWeight]:
        return read_linears(_projections(table.geometry), self._source)


def _projections(geometry: ModelGeometry) -> list[Linear]:
    return [linear for _, linear in geometry.linears() if linear.section != "other"]


def prepare_weights(stats: CalibrationStats, source: Checkpoint, recipe: Recipe) -> RankWeights:
    """Open the weights, and compute their scales for the recipe's degrees.

    Raises:
        ModelError: the model, whose modules show which weights are fused or transposed, cannot
            be built; or an int4 checkpoint is damaged, or is of another model.
        ExportError: a scale cannot be computed.
    """
    is_int4 = is_int4_source(source)
    skeleton = build_skeleton(open_source(str(source.folder)))
    tables = {tp: _compute_scales(stats, recipe, tp) for tp in dict.fromkeys(recipe.tp)}
    if not is_int4:
        weights = WeightSource(skeleton, source)
        return RankWeights(tables=tables, notes=(), _source=weights)
    int4 = Int4Source(source)
    weights = WeightSource(skeleton, int4)
    _check_geometry(stats, weights, source.folder)
    scales = weights.reading_from(ScaleSpread(int4))
    geometry = stats.geometry
    adopted = {
        tp: adopt_scales(
            table,
            read_linears(_projections(geometry), weights),
            read_linears(_projections(geometry), scales),
        )
        for tp, table in tables.items()
    }
    notes = tuple(_describe_int4_source(stats, source, int4))
    return RankWeights(tables=adopted, notes=notes, _source=weights)


def _compute_scales(stats: CalibrationStats, recipe: Recipe, tp: int) -> ScaleTable:
    return compute_linear_scales(
        stats,
        FP8_FORMATS[recipe.scales.fp8_dtype],
        tp=tp,
        fallback=recipe.scales.fallback,
        rule=recipe.scales.rule,
    )


def _check_geometry(stats: CalibrationStats, weights: WeightSource, folder: Path) -> None:
    measured = stats.geometry
    found, _ = find_geometry(
        weights.model, weights.single_tensors, checkpoint_dtype=measured.checkpoint_dtype
    )
    if difference := find_difference(found, measured):
        raise ModelError(
            f"{folder} is not the model these statistics were calibrated on: {difference}",
            hint="pass the int4 checkpoint of the model that was calibrated",
        )


def _describe_int4_source(
    stats: CalibrationStats, source: Checkpoint, int4: Int4Source
) -> Iterator[str]:
    """Warn that the origin of the int4 weights cannot be checked."""
    here = fingerprint_model(source.load_config(), source)
    yield (
        f"{source.folder}: has the shape of the calibrated model, so its int4 weights are assumed "
        f"to come from it (it has {explain_difference(stats.header.model_fingerprint, here)}); if "
        "norms or weights were changed before quantization (smoothing), calibrate that model"
    )
    if int4.quantizes_inputs:
        yield (
            f"{source.folder}: its settings for inputs are ignored: inputs are quantized with the "
            "calibrated scales"
        )
