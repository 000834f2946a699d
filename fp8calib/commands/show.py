"""Show what a file holds: statistics or scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fp8calib.calibration.stats_header import StatsHeader, StatsShard
from fp8calib.checkpoint.locations import find_lone_file, refuse_external_links, require_path
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import Result, Saturation
from fp8calib.errors import cut_list, format_count, format_ranges, shorten
from fp8calib.model.geometry import Layer, Linear, ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN, SMALLEST_SCALE
from fp8calib.numerics.positions import RANGE_STARTS
from fp8calib.text import Block, Line, Table

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats, SiteStats

_KV_SUFFIXES = ("k_scale", "v_scale", "q_scale", "kv_scale", "kv_cache_scaling_factor")


@request_class
class ShowRequest:
    """Print the amax and the scales of a file of statistics or scales.

    Example: fp8calib show SmolLM2-135M-Instruct-fp8calib/stats.safetensors
    """

    file: str | Path = option(
        "STATS|SCALES",
        "Statistics or scales: a file (.safetensors .npz .json) or a folder.",
        reads=Path,
        check=partial(require_path, hint="name statistics or scales"),
    )
    _: KW_ONLY
    everything: bool = option("--all", "Print linears, or all scales, too.", default=False)


ShownRow = dict[str, Any]
"""A row of a table, by the titles of its columns."""


class HeaderShown(StatsHeader):
    """The run that statistics belong to, without the shapes of the model."""

    geometry: ModelGeometry = Field(exclude=True)


class StatsShown(Result):
    """Statistics: every layer and linear, and how early the final amax was reached."""

    header: HeaderShown
    part: StatsShard | None
    """Null for the statistics of a whole run."""
    layers: tuple[ShownRow, ...]
    """K, V and q of each layer."""
    linears: tuple[ShownRow, ...]
    """The input and the weight of each linear."""
    experts: Mapping[str, tuple[int, ...]]
    """The tokens that reached each expert, by layer."""
    positions: dict[str, Any]
    """The amax of each site by ranges of positions, and the first position of each range."""
    saturation: Saturation | None
    unfit_queries: tuple[int, ...]
    """The layers that need a q scale."""

    @property
    def answer(self) -> str:
        """What was measured."""
        geometry, tokens = self.header.geometry, self.header.describe_tokens()
        return f"{geometry.architecture}, {len(geometry.layers)} layers, {tokens}"


class ScalesShown(Result):
    """The scales of a file, exactly as stored."""

    path: Path
    scales: Mapping[str, tuple[float | str, ...] | str]
    """NaN and infinities are text, because JSON has none; a large tensor is only described."""


def run(request: ShowRequest, reporter: Reporter) -> StatsShown | ScalesShown:  # noqa: ARG001
    """Read a file, or what a folder holds.

    Raises:
        ModelError: it holds neither statistics nor scales, or cannot be read.
    """
    with slow_imports():
        from fp8calib.calibration.calibration_stats import load_stats_file
        from fp8calib.calibration.origin import STATS_NAME, is_stats_file
    path = Path(request.file)
    if path.is_dir():
        refuse_external_links(path)
        path = stats if (stats := path / STATS_NAME).is_file() else find_lone_file(path)
    if is_stats_file(path):
        return _show_stats(load_stats_file(path, accepts_shard=True, as_arrays=True))
    from fp8calib.formats.stored_scales import read_stored_scales  # imports torch

    return ScalesShown(path=path, scales=read_stored_scales(path))


def _show_stats(stats: RunStats) -> StatsShown:
    return StatsShown(
        header=HeaderShown(**dict(stats.header)),
        part=stats.shard,
        layers=tuple(_make_layer_row(stats, layer) for layer in stats.geometry.layers),
        linears=tuple(_make_linear_row(stats, linear) for _, linear in stats.geometry.linears()),
        experts=stats.expert_counts,
        positions={
            "first": list(RANGE_STARTS),
            "amax": {
                str(site): seen.positions.tolist()
                for site, seen in stats.sites.items()
                if seen.positions is not None
            },
        },
        saturation=Saturation.of(stats),
        unfit_queries=tuple(stats.list_unfit_queries()),
    )


def _make_layer_row(stats: RunStats, layer: Layer) -> ShownRow:
    """Give K, V and q of a layer; None if there is none, or nothing was observed."""
    attention, mixer = layer.attention, layer.mixer
    seen = k = v = both = query = None
    if attention is not None:
        if attention.producer is not None:
            mixer = f"{mixer} (K/V of layer {attention.producer})"
        owner = stats.geometry.producer_of(attention)
        seen = stats.sites.get(owner.site(Role.K))
        k, v = _find_amax(seen), _find_amax(stats.sites.get(owner.site(Role.V)))
        if attention.kind == "latent":  # one cache, one scale
            both = max((amax for amax in (k, v) if amax is not None), default=None)
        query = _find_amax(stats.sites.get(attention.site(Role.Q)))
        query = None if query is None else query / attention.query_divisor
    return {
        "layer": layer.index,
        "mixer": mixer,
        "k amax": k,
        "k scale": _compute_scale(both or k),
        "v amax": v,
        "v scale": _compute_scale(both or v),
        "q amax": query,
        "q scale": _compute_scale(query),
        "tokens": None if seen is None else seen.count,
    }


def _make_linear_row(stats: RunStats, linear: Linear) -> ShownRow:
    seen = stats.sites.get(Site(linear.module, Role.INPUT))
    weight = _find_amax(stats.sites.get(Site(linear.module, Role.WEIGHT)))
    amax = _find_amax(seen)
    return {
        "linear": linear.module,
        "input amax": amax,
        "input scale": _compute_scale(amax),
        "weight amax": weight,
        "weight scale": _compute_scale(weight),
        "tokens": None if seen is None else seen.count,
    }


def _find_amax(seen: SiteStats | None) -> float | None:
    return None if seen is None or not len(seen.amax) else float(seen.amax.max())


def _compute_scale(amax: float | None) -> float | None:
    """Divide in fp32, as `scale_of` does for tensors."""
    import numpy as np

    if amax is None or not amax > 0:
        return None
    return max(float(np.float32(amax) / np.float32(E4M3FN.max)), SMALLEST_SCALE)


def describe(result: StatsShown | ScalesShown, request: ShowRequest) -> Iterator[Block]:
    """Describe the run, and give tables of amax and scales."""
    if isinstance(result, ScalesShown):
        names = [name for name in result.scales if name.endswith(_KV_SUFFIXES)]
        if request.everything or not names:
            names = list(result.scales)
        found = ((name, result.scales[name]) for name in names)
        cells = [
            [shorten(name), x if isinstance(x, str) else cut_list([f"{float(y):.6g}" for y in x])]
            for name, x in found
        ]
        title = f"{shorten(str(result.path))}: {len(result.scales):,} scales"
        yield Table(title=title, columns=["scale", "value"], rows=cells)
        return
    yield from map(Line, _describe_run(result))
    yield _make_table("K, V and q", result.layers)
    if result.unfit_queries:
        yield Line(f"layers that need a q scale: {format_ranges(result.unfit_queries)}")
    if request.everything:
        yield _make_table("linears", result.linears)
    for name, counts in result.experts.items():
        unseen = [expert for expert, count in enumerate(counts) if count == 0]
        if unseen or request.everything:
            missed = f"; never reached: {format_ranges(unseen)}" if unseen else ""
            yield Line(f"{name}: tokens per expert {min(counts)} to {max(counts)}{missed}")
    yield from map(Line, result.header.describe_skipped())


def _describe_run(result: StatsShown) -> Iterator[str]:
    header, geometry = result.header, result.header.geometry
    yield (
        f"{geometry.architecture}, {len(geometry.layers)} layers, {geometry.checkpoint_dtype} "
        f"weights, computed in {header.compute_dtype}"
    )
    yield (
        f"{header.describe_tokens()} in {format_count(header.num_sequences, 'sequence')} of "
        f"{', '.join(header.data_sources) or 'no data'}; recipe {header.recipe_name}"
    )
    yield f"model {header.model_fingerprint[:16]}, data {header.data_fingerprint[:16]}"
    if (shard := result.part) is not None:
        yield (
            f"only {shard.describe()} ({shard.num_sequences} sequences): scales need the "
            "statistics of all shards, which `fp8calib export SHARDS --out DIR` joins"
        )
    if result.saturation is not None:
        yield result.saturation.describe()


def _make_table(title: str, rows: Sequence[ShownRow]) -> Table:
    columns = list(next(iter(rows), {}))
    return Table(title=title, columns=columns, rows=[list(map(_format, e.values())) for e in rows])


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


show = as_function("show", ShowRequest, run)
