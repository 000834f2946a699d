"""Merge the shards of a calibration: maxima and sums, exact in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fp8calib.errors import ModelError
from fp8calib.geometry.sites import Site
from fp8calib.stats.calibration_origin import explain_difference
from fp8calib.stats.calibration_stats import (
    CalibrationStats,
    StatsHeader,
    StatsShard,
    join_ranges,
)
from fp8calib.stats.statistic import STATISTICS, SiteStats

_ONE_RUN = "the runs of all shards must differ only in --shard"


def merge_sites(parts: Iterable[Mapping[Site, SiteStats]]) -> dict[Site, SiteStats]:
    """Join the statistics of each site over several parts of the data."""
    merged: dict[Site, SiteStats] = {}
    for part in parts:
        for site, found in part.items():
            merged[site] = _join(merged[site], found) if site in merged else found
    return merged


def _join(one: SiteStats, other: SiteStats) -> SiteStats:
    tensors = {**one.tensors, **other.tensors}
    for name in one.tensors.keys() & other.tensors.keys():
        tensors[name] = STATISTICS[name].join(one.tensors[name], other.tensors[name])
    return SiteStats(count=one.count + other.count, tensors=tensors)


def merge_shards(named: Sequence[tuple[str, CalibrationStats]]) -> CalibrationStats:
    """Merge all shards of one run, in any order: the result is that of the unsharded run.

    Args:
        named: each shard's statistics with its name in messages.

    Raises:
        ModelError: the shards are of different runs, one is given twice, or one is missing.
    """
    found = [(name, stats, _shard_of(name, stats)) for name, stats in named]
    if not found:
        raise ModelError("no shards to join", hint="name the stats.safetensors of every shard")
    found.sort(key=lambda each: each[2].index)  # the first shard names the data sources
    first_name, first, first_shard = found[0]
    for name, stats, shard in found[1:]:
        if difference := explain_other_run(first.header, stats.header):
            raise ModelError(
                f"{name} and {first_name} are of different runs: {difference}", hint=_ONE_RUN
            )
        _check_same_division(first_name, first_shard, name, shard)
    shards = [(name, shard) for name, _, shard in found]
    _check_indices(shards)
    _check_sequences(shards, first.header)
    others = [stats.header.skipped for _, stats, _ in found[1:]]
    skipped = tuple(item for item in first.header.skipped if all(item in each for each in others))
    return replace(
        first,
        header=first.header.model_copy(update={"skipped": skipped}),
        sites=merge_sites(stats.sites for _, stats in named),
        shard=None,
    )


def _shard_of(name: str, stats: CalibrationStats) -> StatsShard:
    if stats.shard is None:
        raise ModelError(
            f"{name} is not a shard: it holds the statistics of a whole run",
            hint="leave it out; `fp8calib calibrate --shard I/N` writes shards",
        )
    if stats.shard.is_checkpoint:
        raise ModelError(
            f"{name} is the checkpoint of an interrupted run, not a finished shard",
            hint="finish that run first: repeat its command with --resume",
        )
    return stats.shard


def explain_other_run(header: StatsHeader, other: StatsHeader) -> str:
    """Explain how two runs differ; empty if they are the same.

    Skipped sites, and the file names of equal data, are not compared.
    """
    return "; ".join(_differences(header, other))


def _differences(header: StatsHeader, other: StatsHeader) -> Iterator[str]:
    if header.schema_version != other.schema_version:
        yield "statistics of different versions of this tool"
    if header.model_fingerprint != other.model_fingerprint:
        models = header.model_fingerprint, other.model_fingerprint
        yield f"different model ({explain_difference(*models, between=', and ')})"
    elif header.geometry != other.geometry:
        yield "different geometry of the same model"
    if header.data_fingerprint != other.data_fingerprint:
        yield f"different data ({_describe_data(header)}, and {_describe_data(other)})"
    if (header.recipe_name, header.recipe_hash) != (other.recipe_name, other.recipe_hash):
        yield f"different recipe ({_describe_recipe(header)}, and {_describe_recipe(other)})"
    if header.compute_dtype != other.compute_dtype:
        yield f"different dtype ({header.compute_dtype}, and {other.compute_dtype})"
    if header.engine != other.engine:
        names = (each.engine or "transformers" for each in (header, other))
        yield f"different engine ({', and '.join(names)})"
    for name in sorted({*header.versions, *other.versions}):
        versions = [each.versions.get(name, "none") for each in (header, other)]
        if versions[0] != versions[1]:
            yield f"different version of {name} ({versions[0]}, and {versions[1]})"
    for name in ("histogram_sequences", "input_histogram_tokens"):
        if getattr(header, name) != getattr(other, name):
            yield f"different {name} ({getattr(header, name)}, and {getattr(other, name)})"


def _describe_data(header: StatsHeader) -> str:
    return (
        f"{header.num_tokens} tokens in {header.num_sequences} sequences of "
        f"{', '.join(header.data_sources)}, {header.data_fingerprint[:8]}"
    )


def _describe_recipe(header: StatsHeader) -> str:
    return f"{header.recipe_name} {header.recipe_hash[:8]}"


def _check_same_division(name: str, shard: StatsShard, other_name: str, other: StatsShard) -> None:
    if shard.count != other.count:
        raise ModelError(
            f"{name} is {shard.describe()}, but {other_name} is {other.describe()}", hint=_ONE_RUN
        )
    if shard.batch_size != other.batch_size:
        raise ModelError(
            f"{name} was run with --batch-size {shard.batch_size}, but {other_name} with "
            f"{other.batch_size}: the shards depend on it",
            hint=_ONE_RUN,
        )


def _check_indices(named: Sequence[tuple[str, StatsShard]]) -> None:
    by_index: dict[int, str] = {}
    for name, shard in named:
        if shard.index in by_index:
            raise ModelError(
                f"{by_index[shard.index]} and {name} are both {shard.describe()}",
                hint="name every shard once",
            )
        by_index[shard.index] = name
    count = named[0][1].count
    missing = [str(index) for index in range(1, count + 1) if index not in by_index]
    if missing:
        what = f"shard {missing[0]}" if len(missing) == 1 else f"shards {', '.join(missing)}"
        verb = "is" if len(missing) == 1 else "are"
        raise ModelError(
            f"{what} of {count} {verb} missing",
            hint=f"run `fp8calib calibrate ... --shard {missing[0]}/{count}`, then name its file",
        )


def _check_sequences(named: Sequence[tuple[str, StatsShard]], header: StatsHeader) -> None:
    joined = join_ranges([each for _, shard in named for each in shard.sequences])
    if joined != ((0, header.num_sequences),):
        names = ", ".join(name for name, _ in named)
        raise ModelError(
            f"{names}: together they do not hold all {header.num_sequences} sequences",
            hint="name the files of finished runs, not the checkpoints of interrupted ones",
        )
