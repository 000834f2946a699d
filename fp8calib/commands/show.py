"""Show what a file holds: statistics or scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AliasGenerator, ConfigDict, Field

from fp8calib.calibration.header import StatsHeader, StatsShard
from fp8calib.checkpoint.links import refuse_external_links
from fp8calib.checkpoint.locations import require_path
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.function import Reporter, as_function
from fp8calib.commands.magnitudes import summarize_layers, summarize_scales
from fp8calib.commands.option import Option
from fp8calib.commands.result import Overview, Record, Result
from fp8calib.commands.saturation import PositionSaturation, Saturation
from fp8calib.errors import cut_list, shorten
from fp8calib.model.shapes import Layer, Linear, ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN, SMALLEST_SCALE
from fp8calib.numerics.positions import range_starts
from fp8calib.text import Block, Line, Table

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import CalibrationStats
    from fp8calib.calibration.statistic import SiteStats

_HINT = "tables: --all, --kv"
_KV_SUFFIXES = ("k_scale", "v_scale", "q_scale", "kv_scale", "kv_cache_scaling_factor")


@dataclass(frozen=True, slots=True)
class ShowRequest:
    """Print what stands out in a file of statistics or scales, or tables of it.

    Example: fp8calib show SmolLM2-135M-Instruct-fp8calib/stats.safetensors --kv
    """

    file: Annotated[
        str | Path,
        Option(
            metavar="STATS|SCALES",
            reads=Path,
            check=partial(require_path, hint="name statistics or scales"),
            help="Statistics or scales: a file (.safetensors .npz .json) or a folder.",
        ),
    ]
    _: KW_ONLY
    everything: Annotated[
        bool, Option("--all", help="Print every table instead of what stands out.", is_layout=True)
    ] = False
    kv: Annotated[
        bool,
        Option("--kv", help="Print the table of K, V and q; --all has it too.", is_layout=True),
    ] = False


class _Row(Record):
    """A row of a table, whose keys are the titles of its columns."""

    model_config = ConfigDict(
        alias_generator=AliasGenerator(serialization_alias=lambda name: name.replace("_", " "))
    )


class LayerRow(_Row):
    """K, V and q of a layer; None where there is none, or nothing was observed."""

    layer: int
    mixer: str
    k_amax: float | None = None
    k_scale: float | None = None
    v_amax: float | None = None
    v_scale: float | None = None
    q_amax: float | None = None
    q_scale: float | None = None
    tokens: int | None = None


class LinearRow(_Row):
    """The input and the weight of a linear."""

    linear: str
    input_amax: float | None
    input_scale: float | None
    weight_amax: float | None
    weight_scale: float | None
    tokens: int | None


class Positions(Record):
    """The amax of each site by ranges of positions."""

    first: tuple[int, ...]
    amax: Mapping[str, tuple[float, ...]]


class HeaderShown(StatsHeader):
    """The run that statistics belong to, without the shapes of the model."""

    geometry: ModelGeometry = Field(exclude=True)


class StatsShown(Result):
    """Statistics: every layer and linear, and how early the final amax was reached."""

    header: HeaderShown
    part: StatsShard | None
    """Null for the statistics of a whole run."""
    layers: tuple[LayerRow, ...]
    linears: tuple[LinearRow, ...]
    experts: Mapping[str, tuple[int, ...]]
    """The tokens that reached each expert, by layer."""
    positions: Positions
    saturation: Saturation | None
    position_saturation: PositionSaturation | None
    unfit_queries: tuple[int, ...]
    """The layers that need a q scale."""

    def overview(self) -> Overview:
        """Name the model and the text."""
        return Overview(
            f"StatsShown: {self.header.geometry.architecture}, {self.header.num_tokens:,} tokens "
            f"in {self.header.num_sequences} sequences"
        )


class ScalesShown(Result):
    """The scales of a file, exactly as stored."""

    path: Path
    scales: Mapping[str, tuple[float | str, ...] | str]
    """NaN and infinities are text, because JSON has none; a large tensor is only described."""

    def overview(self) -> Overview:
        """Count them."""
        return Overview(f"ScalesShown: {len(self.scales):,} scales of {self.path}")


def run(request: ShowRequest, reporter: Reporter) -> StatsShown | ScalesShown:  # noqa: ARG001
    """Read a file, or what a folder holds.

    Raises:
        ModelError: it holds neither statistics nor scales, or cannot be read.
    """
    with slow_imports():
        from fp8calib.calibration.calibration_stats import STATS_NAME, is_stats_file, load_stats
    path = Path(request.file)
    if path.is_dir():
        refuse_external_links(path)
        path = stats if (stats := path / STATS_NAME).is_file() else path
    if is_stats_file(path):
        return show_stats(load_stats(path, accepts_shard=True, as_arrays=True))
    from fp8calib.formats.stored_scales import read_stored_scales  # imports torch

    return ScalesShown(path=path, scales=read_stored_scales(path))


def show_stats(stats: CalibrationStats) -> StatsShown:
    """Make the rows of statistics."""
    from fp8calib.commands.saturation import compute_position_saturation, compute_saturation

    positions = {
        str(site): found.positions.tolist()
        for site, found in stats.sites.items()
        if found.positions is not None
    }
    return StatsShown(
        header=HeaderShown(**dict(stats.header)),
        part=stats.shard,
        layers=tuple(_make_layer_row(stats, layer) for layer in stats.geometry.layers),
        linears=tuple(_make_linear_row(stats, linear) for _, linear in stats.geometry.linears()),
        experts=stats.expert_counts,
        positions=Positions(first=range_starts(), amax=positions),
        saturation=compute_saturation(stats),
        position_saturation=compute_position_saturation(stats),
        unfit_queries=tuple(stats.list_unfit_queries()),
    )


def _make_layer_row(stats: CalibrationStats, layer: Layer) -> LayerRow:
    attention = layer.attention
    if attention is None:
        return LayerRow(layer=layer.index, mixer=layer.mixer)
    mixer, owner = layer.mixer, stats.geometry.producer_of(attention)
    if attention.producer is not None:
        mixer = f"{layer.mixer} (K/V of layer {attention.producer})"
    seen = stats.sites.get(owner.site(Role.K))
    k, v = (_find_amax(stats.sites.get(owner.site(role))) for role in (Role.K, Role.V))
    both = max((amax for amax in (k, v) if amax is not None), default=None)
    is_joint = attention.kind == "latent"  # one cache, one scale
    query = _find_amax(stats.sites.get(attention.site(Role.Q)))
    query = None if query is None else query / attention.query_divisor
    return LayerRow(
        layer=layer.index,
        mixer=mixer,
        k_amax=k,
        k_scale=_compute_scale(both if is_joint else k),
        v_amax=v,
        v_scale=_compute_scale(both if is_joint else v),
        q_amax=query,
        q_scale=_compute_scale(query),
        tokens=None if seen is None else seen.count,
    )


def _make_linear_row(stats: CalibrationStats, linear: Linear) -> LinearRow:
    seen = stats.sites.get(Site(linear.module, Role.INPUT))
    weight = _find_amax(stats.sites.get(Site(linear.module, Role.WEIGHT)))
    amax = _find_amax(seen)
    return LinearRow(
        linear=linear.module,
        input_amax=amax,
        input_scale=_compute_scale(amax),
        weight_amax=weight,
        weight_scale=_compute_scale(weight),
        tokens=None if seen is None else seen.count,
    )


def _find_amax(seen: SiteStats | None) -> float | None:
    return None if seen is None or not len(seen.amax) else float(seen.amax.max())


def _compute_scale(amax: float | None) -> float | None:
    """Divide in fp32, as `scale_of` does for tensors."""
    import numpy as np

    if amax is None or not amax > 0:
        return None
    return max(float(np.float32(amax) / np.float32(E4M3FN.max)), SMALLEST_SCALE)


def describe(result: StatsShown | ScalesShown, request: ShowRequest) -> Iterator[Block]:
    """Describe what stands out; with --all or --kv, give tables."""
    if isinstance(result, ScalesShown):
        yield from _describe_scales(result, request)
    elif request.everything:
        yield from _list_everything(result)
    elif request.kv:
        yield _make_table("K, V and q", LayerRow, result.layers)
    else:
        yield from map(Line, _describe_stats(result))


def describe_skipped(result: StatsShown) -> Iterator[str]:
    """Describe what was not observed in one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for item in result.header.skipped:
        reasons.setdefault(item.why, []).append(str(item.site))
    for why, sites in reasons.items():
        yield f"not measured: {cut_list(sites, 3)}: {why}"


def _describe_stats(result: StatsShown) -> Iterator[str]:
    """Describe the run, and what stands out, in about ten lines."""
    yield from _describe_run(result)
    yield from summarize_layers(result)
    yield from _describe_saturation(result)
    unseen = sum(not count for counts in result.experts.values() for count in counts)
    if result.experts:
        yield f"{unseen} experts were never reached, in {len(result.experts)} layers"
    yield from describe_skipped(result)
    yield _HINT


def _list_everything(result: StatsShown) -> Iterator[Block]:
    header = result.header
    yield from map(Line, _describe_run(result))
    yield Line(f"model {header.model_fingerprint[:16]}, data {header.data_fingerprint[:16]}")
    yield from map(Line, _describe_saturation(result))
    yield _make_table("K, V and q", LayerRow, result.layers)
    yield _make_table("linears", LinearRow, result.linears)
    if result.position_saturation is not None:
        starts = (0, *result.position_saturation.below)
        rows = [
            [site, *map(_format, amax[: len(starts)])]
            for site, amax in result.positions.amax.items()
            if site.endswith((".k", ".v", ".q"))
        ]
        columns = ["site", *(f"from {start}" for start in starts)]
        yield Table(title="amax by position", columns=columns, rows=rows)
    for name, counts in result.experts.items():
        unseen = [str(expert) for expert, count in enumerate(counts) if count == 0]
        missed = f"; never reached: {', '.join(unseen)}" if unseen else ""
        yield Line(f"{name}: tokens per expert {min(counts)} to {max(counts)}{missed}")
    for item in header.skipped:
        yield Line(f"not measured: {item.site}: {item.why}")


def _describe_run(result: StatsShown) -> Iterator[str]:
    header, geometry = result.header, result.header.geometry
    yield (
        f"{geometry.architecture}, {len(geometry.layers)} layers, {geometry.checkpoint_dtype} "
        f"weights, computed in {header.compute_dtype}"
    )
    yield (
        f"{header.describe_tokens()} in {header.num_sequences} sequences of "
        f"{', '.join(header.data_sources) or 'no data'}; recipe {header.recipe_name}"
    )
    if (shard := result.part) is not None:
        yield (
            f"only {shard.describe()} ({shard.num_sequences} sequences): scales need the "
            "statistics of all shards, which `fp8calib export` joins"
        )


def _describe_saturation(result: StatsShown) -> Iterator[str]:
    for found in filter(None, (result.saturation, result.position_saturation)):
        yield found.describe()


def _make_table(title: str, kind: type[_Row], rows: Sequence[_Row]) -> Table:
    columns = [name.replace("_", " ") for name in kind.model_fields]
    cells = [[_format(value) for _, value in row] for row in rows]
    return Table(title=title, columns=columns, rows=cells)


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _describe_scales(result: ScalesShown, request: ShowRequest) -> Iterator[Block]:
    shown = _KV_SUFFIXES if request.kv and not request.everything else ""
    rows = [row for row in result.scales.items() if row[0].endswith(shown)]
    if not (request.everything or request.kv):
        yield Line(f"{shorten(str(result.path))}: {len(rows):,} scales")
        yield from map(Line, summarize_scales(rows))
        yield Line(_HINT)
        return
    cells = [
        [shorten(name), x if isinstance(x, str) else cut_list([f"{float(y):.6g}" for y in x])]
        for name, x in rows
    ]
    yield Table(title=shorten(str(result.path)), columns=["scale", "value"], rows=cells)


show = as_function("show", ShowRequest, run)
