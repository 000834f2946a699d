"""What is different about a calibration that runs one shard of its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8calib.cli.calibrate_job import Job
from fp8calib.data.shares import share_out
from fp8calib.errors import UsageError
from fp8calib.recipe import Recipe
from fp8calib.stats.calibration_stats import STATS_NAME, CalibrationStats


def leave_out_formats(recipe: Recipe) -> Recipe:
    """Take from a recipe what only the whole statistics can give."""
    return recipe.model_copy(update={"formats": (), "quantize": None, "query_scale": False})


def check_shard(job: Job) -> None:
    """Refuse a shard that would be empty, before the model is loaded.

    Raises:
        UsageError: the recipe runs no data, or there are fewer batches than shards.
    """
    shard = job.settings.shard
    if shard is None:
        return
    if job.plan is None:
        raise UsageError(
            f"--shard: recipe {job.recipe.name} runs no data that could be shared out",
            hint="leave out --shard",
        )
    share_out(job.plan, job.recipe.data.batch_size, shard)


def count_planned(job: Job) -> Mapping[str, Any]:
    """Count the tokens and sequences that are to be run, and say of what part they are."""
    shard = job.settings.shard
    found = [] if job.plan is None else share_out(job.plan, job.recipe.data.batch_size, shard)
    return {
        "sequences": sum(len(batch.lengths) for batch in found),
        "tokens": sum(batch.num_tokens for batch in found),
        **({} if shard is None else {"shard": {"index": shard.index, "count": shard.count}}),
    }


def count_run(job: Job, stats: CalibrationStats) -> Mapping[str, Any]:
    """Count the tokens and sequences that were run, and say of what part they are."""
    part = stats.part
    if part is None or job.plan is None:
        return {"tokens": stats.header.num_tokens, "sequences": stats.header.num_sequences}
    run = [
        sequence for first, stop in part.sequences for sequence in job.plan.sequences[first:stop]
    ]
    return {
        "tokens": sum(map(len, run)),
        "sequences": len(run),
        "shard": {"index": part.index, "count": part.count},
    }


def describe_next(job: Job) -> str | None:
    """Say what is to be done with the shard that was written; None where there is none."""
    shard = job.settings.shard
    if shard is None:
        return None
    return (
        f"part {shard.index} of {shard.count}: no scales yet. When all {shard.count} are there: "
        f"fp8calib merge PARTS... --out {STATS_NAME}, then fp8calib export {STATS_NAME}"
    )
