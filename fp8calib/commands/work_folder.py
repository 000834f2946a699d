"""The working folder of a calibration, and how --resume continues an earlier run in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8calib.calibration.calibrate import text_hashes_of
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
from fp8calib.commands.job import CalibrationJob
from fp8calib.commands.stats import CalibrationStats as PublicStats
from fp8calib.errors import ExportError, ModelError


class UnwrittenError(ExportError):
    """No output could be written; the run's checkpoints stay."""


def looks_finished(job: CalibrationJob, folder: Path | None) -> bool:
    """Whether a folder may hold the finished run that --resume continues."""
    if not job.resume or folder is None:
        return False
    return all((folder / name).exists() for name in job.owned)


def find_finished(job: CalibrationJob, header: StatsHeader) -> CalibrateResult | None:
    """Find the result of the run that --resume continues, if that run is finished already.

    Raises:
        UsageError: the output folder holds something else.
    """
    if not looks_finished(job, job.out):
        return None
    finished = _read_finished(job, header, job.folder)
    if finished is None:
        check_output(job.folder, job.owned, job.force, inputs=[job.model.source.folder])
    else:
        remove_progress_file(job.folder)
    return finished


def _read_finished(
    job: CalibrationJob, header: StatsHeader, folder: Path
) -> CalibrateResult | None:
    """Read the result from a folder that holds this run, finished; None if it does not."""
    try:
        stats = load_stats(folder / STATS_NAME, accepts_shard=True)
        report = json.loads((folder / REPORT_NAME).read_bytes())
        result = CalibrateResult.from_json(
            {**report, "stats": PublicStats.of(stats), "was_finished": True}
        )
    except (ModelError, ValueError):
        return None
    asked, found = (each and (each.index, each.count) for each in (job.shard, stats.shard))
    is_same = asked == found and not explain_other_run(stats.header, header)
    return result if is_same else None


@contextmanager
def work_folder(job: CalibrationJob, header: StatsHeader) -> Iterator[Journal | CalibrateResult]:
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
        inputs=[job.model.source.folder],
        is_shared=group.size > 1,
        on_old=check_old,
        kept_after=(KeyboardInterrupt, RankLostError, UnwrittenError),
    ) as staging:
        journal = open_journal(staging)
        is_complete = looks_finished(job, staging) and not any(
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
