"""Merge the shards of a calibration: maxima and sums, exact in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fp8calib.calibration.calibration_origin import explain_difference
from fp8calib.calibration.calibration_stats import CalibrationStats, join_ranges
from fp8calib.calibration.header import StatsHeader, StatsShard
from fp8calib.calibration.statistic import merge_sites
from fp8calib.errors import ModelError


def merge_shards(named: Sequence[tuple[str, CalibrationStats]]) -> CalibrationStats:
    """Merge all shards of one run, in any order: the result is that of the unsharded run.

    Args:
        named: each shard's statistics with its name in messages.

    Raises:
        ModelError: the shards are of different runs, one is given twice, or one is missing.
    """
    if not named:
        raise ModelError("no shards to join", hint="name the stats.safetensors of every shard")
    found = [(name, stats, _shard_of(name, stats)) for name, stats in named]
    found.sort(key=lambda each: each[2].index)  # the first shard names the data sources
    first_name, first, first_shard = found[0]
    for name, stats, shard in found[1:]:
        why = explain_other_run(first.header, stats.header) or first_shard.explain_other(shard)
        if why:
            raise ModelError(
                f"{name} and {first_name} are of different runs: {why}",
                hint="the runs of all shards must differ only in --shard",
            )
    for (name, _, shard), (other, _, following) in pairwise(found):
        if shard.index == following.index:
            raise ModelError(
                f"{name} and {other} are both {shard.describe()}", hint="name every shard once"
            )
    count = first_shard.count
    missing = sorted({*range(1, count + 1)} - {shard.index for *_, shard in found})
    if missing:
        what = "shards {} of {} are" if len(missing) > 1 else "shard {} of {} is"
        raise ModelError(
            f"{what.format(', '.join(map(str, missing)), count)} missing",
            hint=f"run `fp8calib calibrate ... --shard {missing[0]}/{count}`, then name its file",
        )
    sequences = join_ranges([each for *_, shard in found for each in shard.sequences])
    if sequences != ((0, first.header.num_sequences),):
        raise ModelError(
            f"{', '.join(name for name, *_ in found)}: together they do not hold all "
            f"{first.header.num_sequences} sequences",
            hint="name the files of finished runs, not the checkpoints of interrupted ones",
        )
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
            hint="name the files of the shards; `fp8calib calibrate ... --shard I/N` writes one",
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
    differences: list[str] = []
    if header.schema_version != other.schema_version:
        differences.append("statistics of different versions of this tool")
    models = header.model_fingerprint, other.model_fingerprint
    if why := explain_difference(*models, between=", and "):
        differences.append(f"different model ({why})")
    elif header.geometry != other.geometry:
        differences.append("other shapes of the same model")
    own, others = _list_settings(header), _list_settings(other)
    for name in own | others:
        texts = own.get(name, "none"), others.get(name, "none")
        if texts[0] != texts[1]:
            differences.append(f"different {name} ({', and '.join(texts)})")
    return "; ".join(differences)


def _list_settings(header: StatsHeader) -> dict[str, str]:
    """List what two runs must have in common."""
    return {
        "data": (
            f"{header.num_tokens} tokens in {header.num_sequences} sequences, "
            f"{header.data_fingerprint[:16]}"
        ),
        "recipe": f"{header.recipe_name} {header.recipe_hash[:16]}",
        "dtype": header.compute_dtype,
        "engine": header.engine or "transformers",
        **{f"version of {name}": header.versions[name] for name in sorted(header.versions)},
        "histogram_sequences": str(header.histogram_sequences),
        "input_histogram_tokens": str(header.input_histogram_tokens),
    }
