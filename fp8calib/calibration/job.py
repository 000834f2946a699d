"""A calibration before it runs: a model, what is observed of it, and on which text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration.batch_view import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS
from fp8calib.calibration.calibration_stats import SiteStats
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.memory_plan import MemoryPlan, Workload, find_limits, plan_halved
from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.stats_header import Observe, StatsHeader
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch, DataPlan, Share, batches
from fp8calib.errors import UsageError
from fp8calib.model.device import DTYPES
from fp8calib.model.geometry import Site
from fp8calib.model.load import ModelSource, load_model
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.weight_source import WeightSource

GPU_BATCH_TOKENS = 8192
"""About as many keep a GPU busy; the same on every GPU, so that shards and resumed runs agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model that text runs through, before its weights are loaded or already with them."""

    name: str
    """As the user names it."""
    source: ModelSource
    checkpoint: Checkpoint
    prepared: PreparedModel
    """Without weights, unless the model is live."""
    device: str
    dtype: str
    dtype_why: str
    device_map: str | None = None
    memory: float | None = None
    """GiB, as limited by the user."""
    is_live: bool = False
    """Whether the caller holds the model in memory."""

    @property
    def is_placed(self) -> bool:
        """Whether how it is held in memory is not for us to choose."""
        return self.is_live or self.device_map is not None

    def load(self, progress: Progress) -> PreparedModel:
        """Give the model with its weights."""
        if self.is_live:
            return self.prepared
        progress.stage("loading the model", None)
        model = load_model(
            self.source,
            dtype=DTYPES[self.dtype],
            device=self.device,
            device_map=self.device_map,
            checkpoint=self.checkpoint,
        )
        return replace(self.prepared, model=model, weights=WeightSource(model, self.checkpoint))

    def describe(self, engine: str = "") -> str:
        """Describe how it computes, on its device or in an engine."""
        return f"computing in {self.dtype} on {engine or self.device} ({self.dtype_why})"

    def list_warnings(self) -> Iterator[str]:
        """Warn of weights that are decoded while they are read, and of tensors without a place."""
        if self.checkpoint.form:
            yield (
                f"{self.name} is quantized already: its {self.checkpoint.form} are dequantized, "
                "and their errors are in everything that is measured; inputs are not quantized"
            )
        if names := ", ".join(self.prepared.leftovers):
            yield f"{self.name}: not parameters of the model, so not loaded: {names}"


ObserveText = Callable[
    ["CalibrationJob", Sequence[Batch], Journal],
    tuple[dict[Site, SiteStats], Mapping[Site, str]],
]
"""Lets an engine load the model of a job, which has no weights, and run batches.

It gives the statistics, and the sites that the engine does not show, with the reason.
"""


@dataclass(frozen=True, kw_only=True)
class CalibrationJob:
    """What is to be observed of a model, and how."""

    model: RunModel
    observe: Observe
    recipe_name: str
    plan: DataPlan | None = None
    """None where only weights are observed."""
    asked_batch_size: int | None = None
    """The sequences of a batch; None leaves them to the job."""
    shard: Share | None = None
    out: Path | None = None
    """The output folder; None writes nothing."""
    group: ProcessGroup = LONE
    """The processes that divide the text."""
    engine: str = ""
    """What runs the text, its version and parallelism; empty for transformers."""
    observe_text: ObserveText | None = None
    """Runs it in the engine."""
    progress: Progress
    make_recorder: Callable[[Path], Recorder] | None = None
    """Makes what records inputs, given the working folder, and may work on each layer while they
    are there, such as round its weights. None only records them."""
    layer_bytes: int = 0
    """What that work needs beside the calibration's own memory."""
    why_streamed: str = ""
    """Why the model is streamed even if it fits into memory."""

    @cached_property
    def header(self) -> StatsHeader:
        """The header of its statistics, without skipped sites and hashes of tensors."""
        model, plan = self.model, self.plan
        return StatsHeader(
            geometry=model.prepared.geometry,
            model_fingerprint=fingerprint_model(model.source.raw_config, model.checkpoint.stored),
            data_fingerprint=plan.fingerprint if plan else "",
            data_sources=plan.sources if plan else (),
            num_sequences=len(plan.sequences) if plan else 0,
            num_tokens=plan.num_tokens if plan else 0,
            recipe_name=self.recipe_name,
            recipe_hash=hashlib.sha256(self.observe.model_dump_json().encode()).hexdigest(),
            compute_dtype=model.dtype,
            histogram_sequences=HISTOGRAM_SEQUENCES,
            input_histogram_tokens=INPUT_HISTOGRAM_TOKENS,
            skipped=(),
            versions=versions(plan.tokens_by_modality if plan else ()),
            measured_quantized=model.checkpoint.form,
            engine=self.engine,
            text_start=plan.start if plan else "",
            modality_tokens=plan.tokens_by_modality if plan else {},
        )

    @property
    def batch_size(self) -> int:
        """The sequences of a batch; an engine runs them one by one."""
        if self.asked_batch_size is not None:
            return self.asked_batch_size
        if self.plan is None or self.engine or self.model.device == "cpu":
            return 1
        return max(1, GPU_BATCH_TOKENS // self.plan.seq_len)

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches of its shard, those that an interrupted run has done among them."""
        whole = [] if self.plan is None else list(batches(self.plan, self.batch_size))
        shard = self.shard
        if shard is None or self.plan is None:
            return whole
        if shard.count > len(whole):
            raise UsageError(
                f"--shard {shard.index}/{shard.count}: the data gives only {len(whole)} batches",
                hint=f"use --shard 1/{len(whole)} to {len(whole)}/{len(whole)}, or more --samples",
            )
        return list(shard.take(whole))

    def open_journal(self, folder: Path = Path(os.devnull), **more: Any) -> Journal:
        """Open the checkpoints in a folder; without one, none are written."""
        own = self.header, self.shard or Share()
        return Journal(folder, *own, self.batch_size, rank=self.group.rank, **more)

    def count(self) -> dict[str, int]:
        """Count the sequences and tokens of these batches."""
        return {
            "sequences": sum(len(batch.lengths) for batch in self.batches),
            "tokens": sum(batch.num_tokens for batch in self.batches),
        }

    @cached_property
    def mode(self) -> MemoryPlan:
        """How the model is held: in memory whole, or streamed."""
        model, observe = self.model, self.observe
        if self.engine or model.is_placed:
            return MemoryPlan()
        elements = sum(  # amax by channel; the plan's reserve covers the other statistics
            (observe.inputs + observe.weights) * linear.in_features
            + observe.weights * linear.out_features
            for _, linear in model.prepared.geometry.linears()
        )
        extra = {"statistics": elements * torch.float32.itemsize}
        if self.layer_bytes:
            extra["work on layers"] = self.layer_bytes
        scratch = Path.cwd()
        if self.out is not None:
            scratch = next(folder for folder in self.out.absolute().parents if folder.is_dir())
        work = Workload(
            prepared=model.prepared,
            device=model.device,
            batches=self.group.share.take(self.batches),
            scratch=scratch,
            sharers=self.group.process_rank.local_size,
            extra=extra,
            least_read_bytes=model.checkpoint.total_size_bytes if observe.weights else 0,
            always_streams=self.why_streamed,
        )
        work = find_limits(work, model.memory)
        return plan_halved(work, 1 if self.asked_batch_size else self.batch_size)
