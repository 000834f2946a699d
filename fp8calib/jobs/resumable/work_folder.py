"""The working folder of a calibration, and how --resume continues an earlier run in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8calib.calibration.calibrate import make_header, text_hashes_of
from fp8calib.calibration.calibration_stats import REPORT_NAME, STATS_NAME, load_stats
from fp8calib.calibration.header import StatsHeader
from fp8calib.calibration.journal import Journal, count_sequences, is_checkpoint
from fp8calib.calibration.merge import explain_other_run
from fp8calib.calibration.processes import RankLostError
from fp8calib.checkpoint.atomic import check_output
from fp8calib.checkpoint.folder_lock import shared_lock
from fp8calib.checkpoint.resumable_folder import (
    PROGRESS_NAME,
    remove_progress_file,
    resumable_folder,
)
from fp8calib.commands.calibrate import CalibrateResult
from fp8calib.errors import ExportError, ModelError
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.stats import CalibrationStats as PublicStats


class UnwrittenError(ExportError):
    """No output could be written; the run's checkpoints stay."""


def make_job_header(job: ResumableJob) -> StatsHeader:
    """Make the header of the statistics that a job will write."""
    return make_header(
        *(job.prepared, job.plan, job.source, job.checkpoint),
        observe=job.recipe.observe,
        recipe_name=job.recipe.name,
        compute_dtype=job.dtype,
        engine=job.engine,
    )


def check_output_of(job: ResumableJob) -> None:
    """Refuse an output folder that is in use, unless it may hold the finished run of --resume."""
    if not _looks_finished(job, job.out):
        check_output(job.folder, job.owned, job.force, inputs=[job.source.folder])


def find_finished(job: ResumableJob, header: StatsHeader) -> CalibrateResult | None:
    """Find the result of the run that --resume continues, if that run is finished already.

    Raises:
        UsageError: the output folder holds something else.
    """
    if not _looks_finished(job, job.out):
        return None
    finished = _read_finished(job, header, job.folder)
    if finished is None:
        check_output(job.folder, job.owned, job.force, inputs=[job.source.folder])
    else:
        remove_progress_file(job.folder)
    return finished


def _looks_finished(job: ResumableJob, folder: Path | None) -> bool:
    if not job.resume or folder is None:
        return False
    return all((folder / name).exists() for name in job.owned)


def _read_finished(job: ResumableJob, header: StatsHeader, folder: Path) -> CalibrateResult | None:
    """Read the result from a folder that holds this run, finished; None if it does not."""
    try:
        stats = load_stats(folder / STATS_NAME, accepts_shard=True)
        report = json.loads((folder / REPORT_NAME).read_bytes())
        result = CalibrateResult.from_json(
            {**report, "stats": PublicStats.of(stats), "was_finished": True}
        )
    except (ModelError, ValueError):
        return None
    shards = [
        None if each is None else (each.index, each.count) for each in (job.shard, stats.shard)
    ]
    is_same = shards[0] == shards[1] and not explain_other_run(stats.header, header)
    return result if is_same else None


@contextmanager
def work_folder(job: ResumableJob, header: StatsHeader) -> Iterator[Journal | CalibrateResult]:
    """Open the working folder of a run; it becomes the output folder at the end.

    An interruption, a failed peer and a failure to write the output keep it for --resume; any
    other error removes it. Of several processes the first one does all of this; the others write
    their checkpoints to its folder.

    Yields:
        The journal in the folder; or the result of an earlier run that wrote all output there but
        could not move it.

    Raises:
        UsageError: the folder is in use, or --resume finds another calibration in it.
        ModelError: a checkpoint is damaged.
    """
    group = job.group

    def open_journal(folder: Path, **done: Any) -> Journal:
        return Journal(
            folder,
            header,
            text_hashes_of(job.plan),
            shard=job.shard,
            batch_size=job.batch_size,
            warn=job.reporter.warn,
            rank=group.rank,
            **done,
        )

    def check_old(staging: Path) -> None:
        """Check what an interrupted run left, or warn that it is lost."""
        if job.resume:
            open_journal(staging).load()
            if job.layer_job is not None:
                job.layer_job.check_same(staging)
        elif any(path.name != PROGRESS_NAME for path in staging.iterdir()):
            job.reporter.warn(
                f"{staging}: the checkpoints of an interrupted run were discarded; to continue "
                "such a run, add --resume to its command line"
            )

    if not group.is_first:
        made = group.broadcast(dict)
        path, ranges = Path(made["folder"]), tuple(map(tuple, made["sequences"]))
        with shared_lock(path):
            yield open_journal(path, sequences=ranges, weights=made["weights"])
        return
    with resumable_folder(
        job.folder,
        owned=job.owned,
        tag="fp8calib calibrate",
        resume=job.resume,
        force=job.force,
        inputs=[job.source.folder],
        is_shared=group.size > 1,
        on_old=check_old,
        kept_after=(KeyboardInterrupt, RankLostError, UnwrittenError),
    ) as staging:
        journal = open_journal(staging)
        is_complete = _looks_finished(job, staging) and not any(
            map(is_checkpoint, staging.iterdir())
        )
        finished = _read_finished(job, header, staging) if is_complete and group.size == 1 else None
        if finished is not None:
            yield finished
            return
        remove_outputs(staging)
        if job.resume:
            journal.load()
            job.reporter.say(f"--resume: {_describe_start(journal, header)}")
        if group.size > 1:
            done = {"sequences": journal.sequences, "weights": sorted(journal.weights)}
            group.broadcast(lambda: {"folder": str(staging), **done})
        yield journal
        journal.remove()


def _describe_start(journal: Journal, header: StatsHeader) -> str:
    if journal.has_layers:
        return "continuing after the finished layers"
    if not journal.sequences and not journal.weights:
        return "no interrupted run found, starting from the beginning"
    done = count_sequences(journal.sequences)
    return f"{done} of {header.num_sequences} sequences are done, continuing with the rest"


def remove_outputs(folder: Path) -> None:
    """Remove output that an earlier run began to write; it is written again."""
    for path in folder.iterdir():
        if path.name == PROGRESS_NAME or is_checkpoint(path):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
