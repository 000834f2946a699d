"""Statistics with the scales that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import torch

from fp8calib.calibration import calibration_stats
from fp8calib.calibration.calibration_stats import merge_shards
from fp8calib.commands.options import Stats
from fp8calib.commands.recipe import ScaleOptions, validate
from fp8calib.errors import UsageError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.kv.kv_scales import make_scale_tensors
from fp8calib.numerics.formats import FP8_FORMATS


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CalibrationStats(calibration_stats.RunStats):
    """The statistics of one calibration: `amax` and histograms of every tensor, and its origin."""

    def __repr__(self) -> str:
        name, tokens = self.geometry.architecture, self.header.describe_tokens()
        return f"CalibrationStats({name}: {len(self.sites)} tensors, {tokens})"

    @classmethod
    def of(cls, stats: calibration_stats.RunStats) -> Self:
        """Add the methods of this class to statistics."""
        names = (field.name for field in fields(calibration_stats.RunStats))
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
            tp: ranks. Above 1, a scale covers the heads of its rank; those of heads are the same.
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
        tp = 1 if granularity == "head" else tp
        given = {"rule": rule, "fallback": fallback, "fp8_dtype": fp8_dtype}
        options = validate(ScaleOptions, given)
        table = compute_kv_scales(
            self,
            FP8_FORMATS[options.fp8_dtype],
            tp=tp,
            per_head=granularity == "head",
            query=bool(self.list_unfit_queries()) if query is None else query,
            rules=options.choice,
        )
        return make_scale_tensors(table, all_ranks=tp != 1)

    def amax_table(self) -> list[dict[str, str | int | float | None]]:
        """List the amax of every tensor as plain values, which `pandas.DataFrame` takes.

        Returns:
            Rows by layer: `layer` (None outside of the layers), `role`, `module`, `amax` (None
            where no token was seen) and `tokens` (0 for weights).
        """
        layer_of = self.geometry.index_modules()
        rows = [
            {
                "layer": layer_of.get(site.module),
                "role": str(site.role),
                "module": site.module,
                "amax": float(seen.amax.max()) if seen.amax.numel() else None,
                "tokens": seen.count,
            }
            for site, seen in sorted(self.sites.items())
        ]
        return sorted(rows, key=lambda row: (row["layer"] is None, row["layer"]))


def read_stats(
    stats: Stats, *, accepts_shard: bool = False
) -> tuple[calibration_stats.RunStats, list[Path]]:
    """Read what a caller gives as statistics; the file is listed if it is one."""
    found: Any = getattr(stats, "stats", stats)  # of the result of `calibrate`
    if isinstance(found, calibration_stats.RunStats):
        return found, []
    loaded = calibration_stats.load_stats_file(Path(found), accepts_shard=accepts_shard)
    return loaded, [Path(found)]


def join_stats(
    given: Stats | Sequence[Stats],
) -> tuple[calibration_stats.RunStats, list[Path], tuple[str, ...]]:
    """Read the statistics of a run, or join those of its shards.

    Returns:
        The statistics; the files that were read; and what was joined, as messages name it, empty
        for the statistics of one run.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str)
    parts: Any = given if several else [given]
    read = [read_stats(each, accepts_shard=True) for each in parts]
    inputs = [path for _, paths in read for path in paths]
    if len(read) == 1 and read[0][0].shard is None:
        return read[0][0], inputs, ()
    names = [str(next(iter(paths), f"stats[{index}]")) for index, (_, paths) in enumerate(read)]
    joined = merge_shards([(name, stats) for name, (stats, _) in zip(names, read, strict=True)])
    return joined, inputs, tuple(names)


def load_stats(path: str | Path) -> CalibrationStats:
    """Load the statistics that `calibrate` wrote: the file, or its output folder.

    Raises:
        UsageError: there is no such file, or it holds one shard of a calibration.
        ModelError: the file is damaged, or holds something else.
    """
    return CalibrationStats.of(calibration_stats.load_stats_file(Path(path)))
