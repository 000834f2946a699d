"""The result of a quantization."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.model_config import find_dtype
from fp8calib.commands.quantize import QuantizeResult, UnquantizedLinear
from fp8calib.commands.recipe import Quantize
from fp8calib.commands.result import BeforeAfter, LayerScheme
from fp8calib.model.kv_bytes import estimate_kv_bytes, kv_bytes_per_token
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.quantize import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOutcome:
    """The plan of a quantization and what came of it."""

    plan: QuantizePlan
    written: Written
    folder: Path
    """Where the checkpoint is now."""
    out: Path
    """Where it will be."""
    source_bytes: int
    duration_s: float
    stats: CalibrationStats | None
    notes: tuple[str, ...]


def make_quantize_result(
    outcome: QuantizationOutcome, served: Quantize | None = None
) -> QuantizeResult:
    """Make the result of a written checkpoint; `served` is how a recipe wants it to be served."""
    plan = outcome.plan
    stats = outcome.stats if plan.has_kv else None
    size = (
        kv_bytes_per_token(stats.geometry)
        if stats
        else estimate_kv_bytes(plan.config, find_dtype(plan.config))
    )
    return QuantizeResult(
        out=outcome.out,
        files=outcome.written.files,
        scheme=plan.settings.schemes.default.name,
        layer_schemes=list_layer_schemes(plan),
        format=plan.settings.dialect.name,
        bytes=BeforeAfter(
            before=outcome.source_bytes, after=sum(shard.data_bytes for shard in plan.shards)
        ),
        duration_s=outcome.duration_s,
        resumed=outcome.written.resumed,
        quantized=tuple(matrix.module for matrix in plan.selection.quantized),
        left=tuple(
            UnquantizedLinear(module=item.module, why=item.why)
            for item in plan.selection.unquantized
        ),
        dead=outcome.written.all_zero,
        has_kv_scales=plan.has_kv,
        notes=(
            *outcome.notes,
            *(f"{name}: not copied: {why}" for name, why in plan.skipped.items()),
        ),
        kv_bytes_per_token=None
        if size is None or (served and served.kv_cache_dtype_skip_layers)
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
