"""What stands out in statistics or scales, or tables of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.blocks import Block, Line, Table
from fp8calib.errors import cut_list, shorten
from fp8calib.render.summary import summarize_layers, summarize_scales
from fp8calib.requests.show import ShowRequest
from fp8calib.results.show import (
    LayerRow,
    LinearRow,
    ScalesShown,
    StatsShown,
)

_HINT = "tables: --all, --kv"
_KV_SUFFIXES = ("k_scale", "v_scale", "q_scale", "kv_scale", "kv_cache_scaling_factor")
_KV_AND_Q = (".k", ".v", ".q")


def describe(result: StatsShown | ScalesShown, request: ShowRequest) -> Iterator[Block]:
    """Describe what stands out; with --all or --kv, give tables."""
    if isinstance(result, ScalesShown):
        yield from _describe_scales(result, request)
    elif request.everything:
        yield from _list_everything(result)
    elif request.kv:
        yield _list_kv(result)
    else:
        yield from map(Line, _describe_stats(result))
        yield Line(_HINT)


def describe_skipped(result: StatsShown) -> Iterator[str]:
    """Describe what was not observed in one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for item in result.header.skipped:
        reasons.setdefault(item.why, []).append(str(item.site))
    for why, sites in reasons.items():
        yield f"not observed: {cut_list(sites, 3)}: {why}"


def _describe_stats(result: StatsShown) -> Iterator[str]:
    """Describe the run, and what stands out, in about ten lines."""
    yield from _describe_run(result)
    yield from summarize_layers(result)
    yield from _describe_saturation(result)
    unseen = sum(not count for counts in result.experts.values() for count in counts)
    if result.experts:
        yield f"{unseen} experts were never reached, in {len(result.experts)} layers"
    yield from describe_skipped(result)


def _list_everything(result: StatsShown) -> Iterator[Block]:
    header = result.header
    yield from map(Line, _describe_run(result))
    yield Line(f"model {header.model_fingerprint[:16]}, data {header.data_fingerprint[:16]}")
    yield from map(Line, _describe_saturation(result))
    yield _list_kv(result)
    yield _make_table("linears", result.linears, LinearRow)
    if result.position_saturation is not None:
        yield _list_positions(result, (0, *result.position_saturation.below))
    for name, counts in result.experts.items():
        unseen = [str(expert) for expert, count in enumerate(counts) if count == 0]
        missed = f"; never reached: {', '.join(unseen)}" if unseen else ""
        yield Line(f"{name}: tokens per expert {min(counts)} to {max(counts)}{missed}")
    for item in header.skipped:
        yield Line(f"not observed: {item.site}: {item.why}")


def _describe_run(result: StatsShown) -> Iterator[str]:
    header = result.header
    geometry = header.geometry
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
    for found in (result.saturation, result.position_saturation):
        if found is not None:
            yield found.describe()


def _list_kv(result: StatsShown) -> Table:
    return _make_table("K, V and q", result.layers, LayerRow)


def _list_positions(result: StatsShown, starts: Sequence[int]) -> Table:
    """List K, V and q by range of positions."""
    rows = [
        [site, *map(_format, amax[: len(starts)])]
        for site, amax in result.positions.amax.items()
        if site.endswith(_KV_AND_Q)
    ]
    columns = ["site", *(f"from {start}" for start in starts)]
    return Table(title="amax by position", columns=columns, rows=rows)


def _make_table(
    title: str,
    rows: Sequence[LayerRow | LinearRow],
    kind: type[LayerRow | LinearRow],
) -> Table:
    columns = [name.replace("_", " ") for name in kind.model_fields]
    cells = [[_format(value) for _, value in row] for row in rows]
    return Table(title=title, columns=columns, rows=cells)


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _describe_scales(result: ScalesShown, request: ShowRequest) -> Iterator[Block]:
    title = shorten(str(result.path))
    rows = [*result.scales.items()]
    if not (request.everything or request.kv):
        yield Line(f"{title}: {len(rows):,} scales")
        yield from map(Line, summarize_scales(rows))
        yield Line(_HINT)
        return
    if request.kv:
        rows = [row for row in rows if row[0].endswith(_KV_SUFFIXES)]
    cells = [[shorten(name), _format_values(values)] for name, values in rows]
    yield Table(title=title, columns=["scale", "value"], rows=cells)


def _format_values(values: Sequence[float | str] | str) -> str:
    if isinstance(values, str):
        return values
    return cut_list([f"{float(value):.6g}" for value in values])
