"""Joining parts of a calibration to the whole: maxima and sums, exact in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fp8calib.errors import UsageError
from fp8calib.geometry.sites import Site
from fp8calib.stats.calibration_origin import explain_difference
from fp8calib.stats.calibration_stats import (
    CalibrationStats,
    StatsHeader,
    StatsShard,
    join_ranges,
)
from fp8calib.stats.statistic import STATISTICS, SiteStats

_ONE_RUN = "parts come from runs that differ in nothing but --shard"


def merge_sites(parts: Iterable[Mapping[Site, SiteStats]]) -> dict[Site, SiteStats]:
    """Join what was seen at each site in several parts of the data."""
    merged: dict[Site, SiteStats] = {}
    for part in parts:
        for site, found in part.items():
            merged[site] = _merge(merged[site], found) if site in merged else found
    return merged


def _merge(one: SiteStats, other: SiteStats) -> SiteStats:
    tensors = {**one.tensors, **other.tensors}
    for name in one.tensors.keys() & other.tensors.keys():
        tensors[name] = STATISTICS[name].join(one.tensors[name], other.tensors[name])
    return SiteStats(count=one.count + other.count, tensors=tensors)


def merge_shards(parts: Sequence[tuple[str, CalibrationStats]]) -> CalibrationStats:
    """Join all parts of one run, in any order, to what the run would have given in one.

    Args:
        parts: each with the name that messages call it by.

    Raises:
        UsageError: they are of different runs, one is there twice, or one is missing; the message
            names it.
    """
    found = [(name, stats, _shard_of(name, stats)) for name, stats in parts]
    if not found:
        raise UsageError("no parts to merge", hint="name the stats.safetensors of every part")
    found.sort(key=lambda each: each[2].index)  # names of the data are those of the first part
    first_name, first, first_part = found[0]
    for name, stats, part in found[1:]:
        _check_one_run(first_name, first.header, name, stats.header)
        _check_one_cut(first_name, first_part, name, part)
    _check_set([(name, part) for name, _, part in found])
    _check_complete([(name, part) for name, _, part in found], first.header)
    return replace(first, sites=merge_sites(stats.sites for _, stats in parts), shard=None)


def _shard_of(name: str, stats: CalibrationStats) -> StatsShard:
    if stats.shard is None:
        raise UsageError(
            f"{name} is whole: there is nothing to merge it with",
            hint="leave it out; parts are written by `fp8calib calibrate --shard I/N`",
        )
    if stats.shard.is_checkpoint:
        raise UsageError(
            f"{name} was kept by a run that was interrupted: it is no finished part",
            hint="end that run first: repeat its command with --resume",
        )
    return stats.shard


def _check_one_run(name: str, header: StatsHeader, other_name: str, other: StatsHeader) -> None:
    difference = explain_other_run(header, other)
    if difference:
        raise UsageError(
            f"{other_name} and {name} are of different runs: {difference}", hint=_ONE_RUN
        )


def explain_other_run(header: StatsHeader, other: StatsHeader) -> str:
    """Say in what two runs differ; empty where they are one.

    What was skipped does not count, nor what the files are called that the same data come from.
    """
    return "; ".join(_differences(header, other))


def _differences(header: StatsHeader, other: StatsHeader) -> Iterator[str]:
    if header.model_fingerprint != other.model_fingerprint:
        how = explain_difference(header.model_fingerprint, other.model_fingerprint)
        yield f"other model ({how.replace('here', 'and')})"
    elif header.geometry != other.geometry:
        yield "the model's geometry was found otherwise"
    if header.data_fingerprint != other.data_fingerprint:
        yield f"other data ({_spell_data(header)}, and {_spell_data(other)})"
    if (header.recipe_name, header.recipe_hash) != (other.recipe_name, other.recipe_hash):
        yield f"other recipe ({_spell_recipe(header)}, and {_spell_recipe(other)})"
    if header.compute_dtype != other.compute_dtype:
        yield f"other dtype ({header.compute_dtype}, and {other.compute_dtype})"
    for name in sorted({*header.versions, *other.versions}):
        versions = [each.versions.get(name, "none") for each in (header, other)]
        if versions[0] != versions[1]:
            yield f"other version of {name} ({versions[0]}, and {versions[1]})"
    for name in ("histogram_sequences", "input_histogram_tokens"):
        if getattr(header, name) != getattr(other, name):
            yield f"other {name} ({getattr(header, name)}, and {getattr(other, name)})"


def _spell_data(header: StatsHeader) -> str:
    return (
        f"{header.num_tokens} tokens in {header.num_sequences} sequences of "
        f"{', '.join(header.data_sources)}, {header.data_fingerprint[:8]}"
    )


def _spell_recipe(header: StatsHeader) -> str:
    return f"{header.recipe_name} {header.recipe_hash[:8]}"


def _check_one_cut(name: str, part: StatsShard, other_name: str, other: StatsShard) -> None:
    if part.count != other.count:
        raise UsageError(
            f"{name} is {part.describe()}, {other_name} is {other.describe()}: not of one set",
            hint=_ONE_RUN,
        )
    if part.batch_size != other.batch_size:
        raise UsageError(
            f"{name} was run with --batch-size {part.batch_size}, {other_name} with "
            f"{other.batch_size}: their micro-batches are not those of one run",
            hint=_ONE_RUN,
        )


def _check_set(parts: Sequence[tuple[str, StatsShard]]) -> None:
    by_index: dict[int, str] = {}
    for name, part in parts:
        if part.index in by_index:
            raise UsageError(
                f"{by_index[part.index]} and {name} are both {part.describe()}",
                hint="name every part once",
            )
        by_index[part.index] = name
    count = parts[0][1].count
    missing = [str(index) for index in range(1, count + 1) if index not in by_index]
    if missing:
        what = f"part {missing[0]}" if len(missing) == 1 else f"parts {', '.join(missing)}"
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{what} of {count} {verb} missing",
            hint=f"run `fp8calib calibrate ... --shard {missing[0]}/{count}`, then name its file",
        )


def _check_complete(parts: Sequence[tuple[str, StatsShard]], header: StatsHeader) -> None:
    """Refuse a checkpoint of an interrupted run, which says what part it is of all the same."""
    joined = join_ranges([each for _, part in parts for each in part.sequences])
    if joined != ((0, header.num_sequences),):
        names = ", ".join(name for name, _ in parts)
        raise UsageError(
            f"{names}: together they do not hold all {header.num_sequences} sequences",
            hint="name what finished runs wrote, no checkpoints of interrupted ones",
        )
