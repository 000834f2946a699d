"""The plan of a calibration, and its working folder, which `--resume` continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fp8calib.calibration.job import CalibrationJob
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.processes import RankLostError
from fp8calib.checkpoint.output import output_folder
from fp8calib.commands.model import describe_run
from fp8calib.commands.request import Reporter
from fp8calib.commands.result import RunPlan
from fp8calib.errors import ExportError


def describe_job(job: CalibrationJob, **more: Any) -> RunPlan:
    """Describe a planned calibration; `more` is added to the plan, or replaces what it has."""
    rows = job.plan.rows if job.plan else None
    described = {
        **job.count(),
        "data": list(job.plan.sources) if job.plan else [],
        "rows": rows and asdict(rows),
    }
    text = rows.describe() if rows else ()
    return describe_run(job.model, job.mode, text, **(described | more))


@contextmanager
def work_folder(
    job: CalibrationJob,
    out: Path,
    reporter: Reporter,
    *,
    owned: frozenset[str],
    resume: bool,
    force: bool,
    check_old: Callable[[Path], object] = lambda _folder: None,
) -> Iterator[Journal]:
    """Open the working folder of a run; it becomes the output folder `out` at the end.

    An interruption, a failed peer and a failure to write keep its checkpoints for --resume; any
    other error removes it. Of several processes the first one does all of this; the others write
    their checkpoints to its folder. `check_old` looks at what an interrupted run left.
    """
    group, old = job.group, list[Journal]()
    open_journal = partial(job.open_journal, warn=reporter.warn)

    def read_old(folder: Path) -> None:
        old.append(open_journal(folder))
        old[0].load()
        check_old(folder)

    if not group.is_first:
        folder, sequences = group.broadcast(tuple)
        yield open_journal(folder, sequences=sequences)
        return
    with output_folder(
        out,
        owned=owned,
        tag="fp8calib calibrate",
        resume=resume,
        force=force,
        inputs=[job.model.source.folder],
        on_old=read_old,
        kept_after=(KeyboardInterrupt, RankLostError, ExportError),
    ) as folder:
        journal = old[0] if old else open_journal(folder)
        if journal.has_layers:
            reporter.say("--resume: continuing after the finished layers")
        elif journal.sequences:
            done = sum(stop - first for first, stop in journal.sequences)
            reporter.say(
                f"--resume: {done} of {job.header.num_sequences} sequences are done, continuing "
                "with the rest"
            )
        elif resume:
            reporter.say("--resume: no interrupted run found, starting from the beginning")
        if group.size > 1:
            group.broadcast(lambda: (folder, journal.sequences))
        yield journal
        journal.remove()
