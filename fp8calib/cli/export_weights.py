"""The weights that `export --with-weights` writes beside the RFC's JSON."""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint.atomic import require_free_space
from fp8calib.checkpoint.reader import Checkpoint
from fp8calib.cli.opening import quiet_libraries
from fp8calib.fp8 import FORMATS
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.logical_weights import read_linears
from fp8calib.model.weights import WeightSource
from fp8calib.quantize.rank_weights import write_rank_weights
from fp8calib.recipe import Recipe
from fp8calib.scales import compute_linear_scales
from fp8calib.stats import CalibrationStats


def write_weights(
    stats: CalibrationStats, source: Checkpoint, folder: Path, recipe: Recipe
) -> list[str]:
    """Write a file for every rank of every degree of the recipe, and name them.

    Raises:
        ModelError: the model's class cannot be built, which tells what is fused and transposed.
        ExportError: a scale cannot be computed, or a file not written.
    """
    quiet_libraries()
    skeleton = build_skeleton(
        open_source(
            str(source.folder),
            revision=None,
            trust_remote_code=False,
            if_quantized="--model is the unquantized model that was calibrated",
        )
    )
    names: list[str] = []
    for tp in recipe.tp:
        require_free_space(folder, source.total_size_bytes // 2)
        table = compute_linear_scales(
            stats,
            FORMATS[recipe.scales.fp8_dtype],
            tp=tp,
            fallback=recipe.scales.fallback,
            rule=recipe.scales.rule,
        )
        weights = read_linears(skeleton, stats.geometry, WeightSource(skeleton, source))
        names += write_rank_weights(table, weights, folder)
    return names
