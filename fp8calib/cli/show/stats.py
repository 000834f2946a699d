"""A stats file: what stands out, or tables of every layer and linear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp8calib.cli.console import print_json, print_table, print_text
from fp8calib.cli.show.summary import TABLES_HINT, summarize_briefly, summarize_layers
from fp8calib.cli.show.tables import Tables
from fp8calib.errors import cut_list
from fp8calib.fp8.formats import E4M3FN
from fp8calib.geometry.model_geometry import Layer, Linear
from fp8calib.geometry.sites import Role, Site
from fp8calib.scales.compute import list_unfit_queries
from fp8calib.scales.scale_table import scale_of
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.positions import range_starts
from fp8calib.stats.saturation import (
    PositionSaturation,
    compute_position_saturation,
    compute_saturation,
)
from fp8calib.stats.statistic import SiteStats

_AMAX_SCALE = ("k amax", "k scale", "v amax", "v scale", "q amax", "q scale")
_KV_COLUMNS = ("layer", "mixer", *_AMAX_SCALE, "tokens")
_LINEAR_COLUMNS = ("linear", "input amax", "input scale", "weight amax", "weight scale", "tokens")
_Rows = list[dict[str, Any]]


def show_stats(stats: CalibrationStats, tables: Tables, *, as_json: bool) -> None:
    """Print what stands out in statistics, or tables of K, V, q, inputs and weights."""
    layers, linears = _list_layers(stats), _list_linears(stats)
    if as_json:
        print_json(
            {
                "header": stats.header.model_dump(mode="json", exclude={"geometry"}),
                "part": None if stats.shard is None else stats.shard.model_dump(mode="json"),
                "layers": layers,
                "linears": linears,
                "experts": stats.expert_counts,
                "positions": {
                    "first": range_starts(),
                    "amax": {
                        str(site): found.positions.tolist()
                        for site, found in stats.sites.items()
                        if found.positions is not None
                    },
                },
            }
        )
        return
    if tables is Tables.NONE:
        for text in describe_stats(stats):
            print_text(text)
        print_text(TABLES_HINT)
    elif tables is Tables.ALL:
        _print_everything(stats, layers, linears)
    else:
        _print_kv(layers)


def describe_stats(stats: CalibrationStats) -> Iterator[str]:
    """Describe the run, and what stands out, in about ten lines."""
    yield from _describe_run(stats)
    yield from describe_magnitudes(stats)
    if (saturation := compute_saturation(stats)) is not None:
        yield saturation.describe()
    if (by_position := compute_position_saturation(stats)) is not None:
        yield by_position.describe()
    unseen = sum(not count for counts in stats.expert_counts.values() for count in counts)
    if stats.expert_counts:
        yield f"{unseen} experts were never reached, in {len(stats.expert_counts)} layers"
    yield from describe_skipped(stats)


def describe_magnitudes(stats: CalibrationStats) -> Iterator[str]:
    """Describe the largest and the smallest amax of each kind, and the outliers."""
    return summarize_layers(_list_layers(stats), _list_linears(stats), list_unfit_queries(stats))


def describe_briefly(stats: CalibrationStats) -> Iterator[str]:
    """Describe what stands out in two lines."""
    return summarize_briefly(_list_layers(stats), _list_linears(stats))


def describe_skipped(stats: CalibrationStats) -> Iterator[str]:
    """Describe what was not observed in one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for item in stats.header.skipped:
        reasons.setdefault(item.why, []).append(str(item.site))
    for why, sites in reasons.items():
        yield f"not observed: {cut_list(sites, 3)}: {why}"


def _print_everything(stats: CalibrationStats, layers: _Rows, linears: _Rows) -> None:
    for text in _describe_run(stats):
        print_text(text)
    header = stats.header
    print_text(f"model {header.model_fingerprint[:16]}, data {header.data_fingerprint[:16]}")
    if (saturation := compute_saturation(stats)) is not None:
        print_text(saturation.describe())
    by_position = compute_position_saturation(stats)
    if by_position is not None:
        print_text(by_position.describe())
    _print_kv(layers)
    print_table("linears", _LINEAR_COLUMNS, [_format_cells(row) for row in linears])
    if by_position is not None:
        _print_positions(stats, by_position)
    for name, counts in stats.expert_counts.items():
        unseen = [str(expert) for expert, count in enumerate(counts) if count == 0]
        print_text(
            f"{name}: tokens per expert {min(counts)} to {max(counts)}"
            + (f"; never reached: {', '.join(unseen)}" if unseen else "")
        )
    for item in header.skipped:
        print_text(f"not observed: {item.site}: {item.why}")


def _print_kv(layers: _Rows) -> None:
    print_table("K, V and q", _KV_COLUMNS, [_format_cells(row) for row in layers])


def _list_layers(stats: CalibrationStats) -> list[dict[str, Any]]:
    return [_layer_row(stats, layer) for layer in stats.geometry.layers]


def _list_linears(stats: CalibrationStats) -> list[dict[str, Any]]:
    return [_linear_row(stats, linear) for _, linear in stats.geometry.linears()]


def _describe_run(stats: CalibrationStats) -> Iterator[str]:
    header = stats.header
    geometry = header.geometry
    yield (
        f"{geometry.architecture}, {len(geometry.layers)} layers, {geometry.checkpoint_dtype} "
        f"weights, computed in {header.compute_dtype}"
    )
    yield (
        f"{header.num_tokens:,} tokens in {header.num_sequences} sequences of "
        f"{', '.join(header.data_sources) or 'no data'}; recipe {header.recipe_name}"
    )
    if (shard := stats.shard) is not None:
        yield (
            f"only {shard.describe()} ({shard.num_sequences} sequences): scales need the "
            "statistics of all shards, which `fp8calib merge` joins"
        )


def _print_positions(stats: CalibrationStats, by_position: PositionSaturation) -> None:
    """Print K, V and q by range of positions."""
    starts = (0, *by_position.below)
    rows = [
        {"site": str(site), **dict(zip(starts, found.positions.tolist(), strict=False))}
        for site, found in stats.sites.items()
        if found.positions is not None and site.role in (Role.K, Role.V, Role.Q)
    ]
    columns = [f"from {start}" for start in starts]
    print_table("amax by position", ("site", *columns), [_format_cells(row) for row in rows])


def _layer_row(stats: CalibrationStats, layer: Layer) -> dict[str, Any]:
    attention = layer.attention
    row: dict[str, Any] = {"layer": layer.index, "mixer": layer.mixer}
    if attention is None:
        return row | dict.fromkeys(_KV_COLUMNS[2:])
    owner = attention
    if attention.producer is not None:
        row["mixer"] = f"{layer.mixer} (K/V of layer {attention.producer})"
        owner = stats.geometry.layers[attention.producer].attention or attention
    seen = {role: _find_amax(stats.sites.get(owner.site(role))) for role in (Role.K, Role.V)}
    both = max((amax for amax in seen.values() if amax is not None), default=None)
    for role, amax in seen.items():
        scaled = both if attention.kind == "latent" else amax  # one cache, one scale
        row |= {f"{role} amax": amax, f"{role} scale": _compute_scale(scaled)}
    query = _find_amax(stats.sites.get(attention.site(Role.Q)))
    query = None if query is None else query / attention.query_divisor
    row |= {"q amax": query, "q scale": _compute_scale(query)}
    row["tokens"] = _count_tokens(stats.sites.get(owner.site(Role.K)))
    return row


def _linear_row(stats: CalibrationStats, linear: Linear) -> dict[str, Any]:
    seen = stats.sites.get(Site(linear.module, Role.INPUT))
    weight = _find_amax(stats.sites.get(Site(linear.module, Role.WEIGHT)))
    amax = _find_amax(seen)
    return {
        "linear": linear.module,
        "input amax": amax,
        "input scale": _compute_scale(amax),
        "weight amax": weight,
        "weight scale": _compute_scale(weight),
        "tokens": _count_tokens(seen),
    }


def _find_amax(seen: SiteStats | None) -> float | None:
    return None if seen is None or not len(seen.amax) else float(seen.amax.max())


def _compute_scale(amax: float | None) -> float | None:
    if amax is None or not amax > 0:
        return None
    return float(scale_of(torch.tensor(amax), E4M3FN))


def _count_tokens(seen: SiteStats | None) -> int | None:
    return None if seen is None else seen.count


def _format_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
        for value in row.values()
    ]
