"""Statistics with the scales that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, Self

import torch

from fp8calib.dialects.kv.kv_scales import make_scale_tensors
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.geometry.sites import KV_ROLES
from fp8calib.jobs.recipe_options import make_scale_options
from fp8calib.requests.shared import Stats
from fp8calib.results.calibrate import CalibrateResult
from fp8calib.scales.compute import compute_kv_scales, list_unfit_queries
from fp8calib.stats import calibration_stats


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CalibrationStats(calibration_stats.CalibrationStats):
    """The statistics of one calibration: `amax` and histograms of every site, and its origin."""

    @classmethod
    def of(cls, stats: calibration_stats.CalibrationStats) -> Self:
        """Add the methods of this class to statistics."""
        names = (field.name for field in fields(calibration_stats.CalibrationStats))
        return cls(**{name: getattr(stats, name) for name in names})

    def kv_scales(
        self,
        *,
        granularity: Literal["tensor", "head"] = "tensor",
        tp: int = 1,
        query: bool | None = None,
        rule: str = "amax",
        fallback: str | None = None,
        fp8_dtype: str = "e4m3fn",
    ) -> dict[str, torch.Tensor]:
        """Compute the scales of K and V of every layer that reads a KV cache.

        They are those that `export --format kv-scales` writes (`tensor`), or `kv-overlay-head`
        (`head`), by the names that they have there.

        Args:
            granularity: one scale for K and one for V of a layer, or for each KV head.
            tp: ranks. Above 1, a scale covers the heads of its rank.
            query: scales of q too; None: if q was observed and needs one in some layer.
            rule: `amax`, `percentile:P`, `mse`, `headroom:H` or `1.0`.
            fallback: what a tensor of zeros gets: `layer-max`, `one` or `refuse`.
            fp8_dtype: `e4m3fn` or `e4m3fnuz`.

        Returns:
            fp32 tensors: 0-dim; [tp] for several ranks; [heads, 1, 1] per head.

        Raises:
            UsageError: an option is invalid, or `tp` does not fit the heads.
            ExportError: the scale of a layer cannot be computed.
        """
        if granularity not in ("tensor", "head"):
            raise UsageError(f"granularity {granularity!r}: must be tensor or head")
        if granularity == "head" and tp != 1:
            raise UsageError(
                f"tp={tp}: scales per head are the same for every rank",
                hint="leave tp out; a rank takes those of its heads",
            )
        options = make_scale_options(rule=rule, fallback=fallback, fp8_dtype=fp8_dtype)
        table = compute_kv_scales(
            self,
            FP8_FORMATS[options.fp8_dtype],
            tp=tp,
            per_head=granularity == "head",
            query=bool(list_unfit_queries(self)) if query is None else query,
            fallback=options.fallback,
            rule=options.rule,
        )
        return make_scale_tensors(table, all_ranks=tp != 1)


def drop_kv(stats: calibration_stats.CalibrationStats) -> calibration_stats.CalibrationStats:
    """Leave out K and V, so that a checkpoint gets no scales of them."""
    kept = {site: seen for site, seen in stats.sites.items() if site.role not in KV_ROLES}
    return replace(stats, sites=kept)


def read_stats(stats: Stats) -> tuple[calibration_stats.CalibrationStats, list[Path]]:
    """Read what a caller gives as statistics; the file is listed if it is one.

    Raises:
        UsageError: there is no such file, or it holds one shard of a calibration.
        ModelError: the file is damaged, or holds something else.
    """
    if isinstance(stats, CalibrateResult):
        return stats.stats, []
    if isinstance(stats, calibration_stats.CalibrationStats):
        return stats, []
    return calibration_stats.load_stats(Path(stats)), [Path(stats)]


def load_stats(path: str | Path) -> CalibrationStats:
    """Load the statistics that `calibrate` wrote: the file, or its output folder.

    Raises:
        UsageError: there is no such file, or it holds one shard of a calibration.
        DataError: the file is damaged, or holds something else.
    """
    return CalibrationStats.of(calibration_stats.load_stats(Path(path)))
