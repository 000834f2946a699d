"""A calibration: what it observes, how it runs, and the working folder that --resume continues."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fp8calib.calibration.calibrate import (
    CalibrationRun,
    TextEngine,
    choose_batch_size,
    collect_stats,
    make_header,
)
from fp8calib.calibration.calibration_stats import RunStats, load_stats_file
from fp8calib.calibration.journal import NAME_PREFIX, Journal
from fp8calib.calibration.memory_plan import MemoryPlan, Workload, find_limits, plan_halved
from fp8calib.calibration.origin import REPORT_NAME, STATS_NAME
from fp8calib.calibration.processes import LONE, ProcessGroup, RankLostError
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.run_model import RunModel
from fp8calib.calibration.stats_header import StatsHeader
from fp8calib.checkpoint.output import PROGRESS_NAME, output_folder
from fp8calib.commands.calibrate import CalibrateResult
from fp8calib.commands.model import describe_run
from fp8calib.commands.recipe import Recipe
from fp8calib.commands.request import Reporter
from fp8calib.commands.result import RunPlan
from fp8calib.commands.stats import CalibrationStats
from fp8calib.data.sequences import Batch, DataPlan, Share, select_batches
from fp8calib.errors import ExportError, ModelError
from fp8calib.formats.write import list_outputs
from fp8calib.machine import PeakMemory
from fp8calib.model.device import DTYPES
from fp8calib.numerics.formats import E4M3FN

if TYPE_CHECKING:  # most recipes quantize nothing
    from fp8calib.quantization.select import Selection
    from fp8calib.quantization.settings import PlanSettings


@dataclass(frozen=True, kw_only=True)
class CalibrationJob:
    """What is to be observed of a model, and where the files go.

    A subclass may also work on each layer while its inputs are there, such as round its weights:
    `why_streamed` and the last three methods are its own.
    """

    model: RunModel
    recipe: Recipe
    """With the caller's changes."""
    plan: DataPlan | None = None
    """None for a recipe that runs no data."""
    shard: Share | None = None
    out: Path | None
    """None writes nothing."""
    group: ProcessGroup = LONE
    """The processes that divide the text."""
    resume: bool = False
    force: bool = False
    engine: TextEngine | None = None
    """What runs the text; None runs it with transformers."""
    reporter: Reporter
    why_streamed: ClassVar[str] = ""
    """Why the model is streamed even if it fits into memory."""

    @cached_property
    def header(self) -> StatsHeader:
        """The header of the statistics that it will write."""
        model = self.model
        return make_header(
            *(model.prepared, self.plan, model.source, model.checkpoint),
            observe=self.recipe.observe,
            recipe_name=self.recipe.name,
            compute_dtype=model.dtype,
            engine=self.engine,
        )

    @cached_property
    def batch_size(self) -> int:
        """The sequences of a batch; an engine runs them one by one."""
        if self.recipe.data.batch_size is not None:
            return self.recipe.data.batch_size
        if self.plan is None or self.engine is not None:
            return 1
        return choose_batch_size(self.model.device, self.plan.seq_len)

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches of its shard, those that an interrupted run has done among them.

        Raises:
            UsageError: there are fewer batches than shards.
        """
        return [] if self.plan is None else select_batches(self.plan, self.batch_size, self.shard)

    @cached_property
    def mode(self) -> MemoryPlan:
        """How the model is held: in memory whole, or streamed.

        Raises:
            UsageError: it fits in neither way.
        """
        model = self.model
        if self.engine is not None or model.is_placed:
            return MemoryPlan()
        scratch = Path.cwd()
        if self.out is not None:
            scratch = next(folder for folder in self.out.absolute().parents if folder.is_dir())
        inputs, weights = self.recipe.observe.inputs, self.recipe.observe.weights
        elements = sum(  # amax by channel; the plan's reserve covers the other statistics
            (inputs + weights) * linear.in_features + weights * linear.out_features
            for _, linear in model.prepared.geometry.linears()
        )
        extra = {"statistics": elements * torch.float32.itemsize}
        if layer_bytes := self.estimate_bytes():
            extra["work on layers"] = layer_bytes
        sharers = self.group.process_rank.local_size
        work = Workload(
            prepared=model.prepared,
            checkpoint=model.checkpoint,
            dtype=DTYPES[model.dtype],
            device=model.device,
            batches=self.group.share.take(self.batches),
            scratch=scratch,
            sharers=sharers,
            extra=extra,
            least_read_bytes=model.checkpoint.total_size_bytes if weights else 0,
            always_streams=self.why_streamed,
        )
        limits = find_limits(model.device, model.memory, sharers=sharers)
        return plan_halved(work, limits, 1 if self.recipe.data.batch_size else self.batch_size)

    @property
    def folder(self) -> Path:
        """The output folder of a job that has one."""
        assert self.out is not None  # noqa: S101 -- the caller knows
        return self.out

    @cached_property
    def owned(self) -> frozenset[str]:
        """Names of the files and folders that a calibration writes in the output folder."""
        formats = list_outputs(self.recipe.formats, self.recipe.tp)
        checkpoint = [self.recipe.quantize.folder] if self.recipe.quantize else []
        return formats.union((STATS_NAME, REPORT_NAME), checkpoint)

    def count(self) -> dict[str, int]:
        """Count its sequences and tokens."""
        return {
            "sequences": sum(len(batch.lengths) for batch in self.batches),
            "tokens": sum(batch.num_tokens for batch in self.batches),
        }

    def select_matrices(self, settings: PlanSettings) -> Selection:
        """Choose the linears to quantize.

        Raises:
            ModelError: the weights cannot be quantized.
            ExportError: the recipe asks for another FP8 format than checkpoints hold.
            UsageError: a pattern names no linear, or divides what engines load as one weight.
        """
        from fp8calib.quantization.plan import select_linears
        from fp8calib.quantization.select import check_unquantized

        fp8_dtype = self.recipe.scales.fp8_dtype
        if fp8_dtype != E4M3FN.name:
            raise ExportError(f"FP8 checkpoints hold {E4M3FN.name}, not {fp8_dtype}")
        check_unquantized(self.model.checkpoint.stored)
        return select_linears(self.model.checkpoint, settings)

    def describe_plan(self, **more: Any) -> RunPlan:
        """Describe the planned run; `more` is added to it, or replaces what it has."""
        rows = self.plan.rows if self.plan else None
        described = {
            **self.count(),
            "data": list(self.plan.sources) if self.plan else [],
            "rows": rows and asdict(rows),
            "out": str(self.out),
            "writes": sorted(self.owned) if self.out else [],
        }
        text = rows.describe() if rows else ()
        return describe_run(self.model, self.mode, text, **(described | more))

    def run(self, journal: Journal | None = None) -> tuple[RunStats, dict[str, Any]]:
        """Run it; without a journal it cannot be resumed, and works on no layer.

        Returns:
            The statistics, and what the run cost, as fields of a `CalibrateResult`.
        """
        progress, group, model, mode = self.reporter, self.group, self.model, self.mode
        where = model.device if self.engine is None else self.engine.describe()
        progress.say(f"computing in {model.dtype} on {where} ({model.dtype_why})")
        if group.size > 1:
            threads = torch.get_num_threads()
            progress.say(f"{group.size} processes share the data, with {threads} threads each")
        started = time.monotonic()
        recorder = None if journal is None else self.open_recorder(journal.folder)
        with PeakMemory() as memory, group.peer_failures():
            run = CalibrationRun(
                prepared=model.load(mode, progress) if self.engine is None else model.prepared,
                plan=self.plan,
                checkpoint=model.checkpoint,
                header=self.header,
                observe=self.recipe.observe,
                batch_size=self.batch_size,
                progress=progress,
                mode=mode,
                device=model.device,
                shard=self.shard,
                journal=journal,
                group=group,
                recorder=recorder,
                engine=self.engine,
            )
            stats = collect_stats(run)
            back_offs = group.gather(run.back_offs)
        duration_s = time.monotonic() - started
        resumed = () if journal is None else journal.sequences
        sequences = () if self.plan is None else self.plan.sequences
        tokens = [len(each) for first, stop in resumed for each in sequences[first:stop]]
        return stats, {
            "duration_s": duration_s,
            # without those that an interrupted run had finished
            "tokens_per_s": (self.count()["tokens"] - sum(tokens)) / duration_s,
            "memory": {**mode.as_json(), "peak_measured_bytes": memory.peak_bytes},
            "batch_back_off": tuple(each for ranks in back_offs for each in ranks),
            "resumed_sequences": len(tokens),
            "ranks": group.size,
        }

    # --- work on each layer -----------------------------------------------------------------------

    def estimate_bytes(self) -> int:
        """Estimate the memory that the work on layers needs beside the calibration's own."""
        return 0

    def open_recorder(self, folder: Path) -> Recorder | None:  # noqa: ARG002
        """Make what records inputs and works on each layer; it writes into the working folder."""
        return None

    def check_same(self, folder: Path) -> None:
        """Refuse what an interrupted run with other options has left in a working folder."""


# --- where it works -------------------------------------------------------------------------------


def looks_finished(job: CalibrationJob, folder: Path) -> bool:
    """Whether a folder may hold the finished run that --resume continues."""
    return job.resume and all((folder / name).exists() for name in job.owned)


def read_finished(job: CalibrationJob, folder: Path) -> CalibrateResult | None:
    """Read the result from a folder that holds this run, finished; None if it does not."""
    if not looks_finished(job, folder):
        return None
    try:
        stats = load_stats_file(folder / STATS_NAME, accepts_shard=True)
        report = json.loads((folder / REPORT_NAME).read_bytes())
        if report.get("quantize"):
            from fp8calib.commands.quantize import QuantizeResult  # few recipes quantize

            report["quantize"] = QuantizeResult.from_json(report["quantize"])
        result = CalibrateResult.from_json(
            {**report, "stats": CalibrationStats.of(stats), "was_finished": True}
        )
    except (ModelError, ValueError):
        return None
    asked, found = (each and (each.index, each.count) for each in (job.shard, stats.shard))
    if asked != found or stats.header.explain_other(job.header):
        return None
    job.reporter.say(f"{job.out} is finished already")
    return result


@contextmanager
def work_folder(job: CalibrationJob) -> Iterator[Journal | CalibrateResult]:
    """Open the working folder of a run; it becomes the output folder at the end.

    An interruption, a failed peer and a failure to write keep its checkpoints for --resume; any
    other error removes it. Of several processes the first one does all of this; the others write
    their checkpoints to its folder.

    Yields:
        The journal in the folder; or the result of an earlier run that wrote all output there but
        could not move it.

    Raises:
        UsageError: the folder is in use, or --resume finds another calibration in it.
        ModelError: a checkpoint is damaged.
    """
    group, say, header = job.group, job.reporter.say, job.header
    old: list[Journal] = []

    def open_journal(folder: Path, **done: Any) -> Journal:
        return Journal(
            folder,
            header,
            shard=job.shard,
            batch_size=job.batch_size,
            warn=job.reporter.warn,
            rank=group.rank,
            **done,
        )

    def read_old(staging: Path) -> None:
        """Read what an interrupted run left."""
        old.append(open_journal(staging))
        old[0].load()
        job.check_same(staging)

    if not group.is_first:
        folder, sequences = group.broadcast(tuple)
        yield open_journal(folder, sequences=sequences)
        return
    with output_folder(
        job.folder,
        owned=job.owned,
        tag="fp8calib calibrate",
        resume=job.resume,
        force=job.force,
        inputs=[job.model.source.folder],
        on_old=read_old,
        kept_after=(KeyboardInterrupt, RankLostError, ExportError),
    ) as staging:
        journal = old[0] if old else open_journal(staging)
        is_lone = group.size == 1 and not any(staging.glob(f"{NAME_PREFIX}*"))
        if is_lone and (finished := read_finished(job, staging)) is not None:
            yield finished
            return
        remove_outputs(staging)
        if journal.has_layers:
            say("--resume: continuing after the finished layers")
        elif journal.sequences:
            done = sum(stop - first for first, stop in journal.sequences)
            say(
                f"--resume: {done} of {header.num_sequences} sequences are done, continuing "
                "with the rest"
            )
        elif job.resume:
            say("--resume: no interrupted run found, starting from the beginning")
        if group.size > 1:
            group.broadcast(lambda: (staging, journal.sequences))
        yield journal
        journal.remove()


def remove_outputs(folder: Path) -> None:
    """Remove output that an earlier run began to write; it is written again."""
    for path in folder.iterdir():
        if path.name == PROGRESS_NAME or path.name.startswith(NAME_PREFIX):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
