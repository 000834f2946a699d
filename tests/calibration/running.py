"""Load a tiny model once and calibrate it in shares, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fp8calib.calibration.calibrate import CalibrationRun, collect_stats, make_header
from fp8calib.calibration.calibration_stats import CalibrationStats, save_stats
from fp8calib.calibration.header import BackOff, Observe, StatsHeader
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.streamed_model import Streaming
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import DataPlan, Share
from fp8calib.model.load import ModelSource, build_skeleton, load_model, open_source
from fp8calib.model.prepared import PreparedModel, prepare
from tests.doors import Silent, make_plan
from tests.zoo import draw

OBSERVE = Observe(weights=True)
LENGTHS = [7, 20, 13, 3, 20, 9, 20, 4, 11, 6, 18, 2, 15]
"""Thirteen sequences, the ninth in the histograms as well as the first; padded in batches."""


@dataclass
class WorkShare:
    """What a run does and what it leaves."""

    shard: Share | None = None
    journal: Journal | None = None
    back_offs: list[BackOff] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """A loaded model."""

    prepared: PreparedModel
    source: ModelSource
    checkpoint: Checkpoint
    streaming: Streaming | None

    def header(self, plan: DataPlan, observe: Observe = OBSERVE) -> StatsHeader:
        """Make the header of a run."""
        return make_header(
            *(self.prepared, plan, self.source, self.checkpoint),
            observe=observe,
            recipe_name="test",
        )

    def calibrate(
        self,
        share: WorkShare | None = None,
        *,
        plan: DataPlan | None = None,
        batch_size: int = 2,
        observe: Observe = OBSERVE,
        progress: Silent | None = None,
    ) -> CalibrationStats:
        """Calibrate it, on sequences of `LENGTHS` unless a plan is given."""
        plan = plan or rows_of(LENGTHS)
        run = CalibrationRun(
            prepared=self.prepared,
            plan=plan,
            checkpoint=self.checkpoint,
            header=self.header(plan, observe),
            observe=observe,
            batch_size=batch_size,
            progress=progress or Silent(),
            streaming=self.streaming,
            **vars(share or WorkShare()),
        )
        return collect_stats(run)


def rows_of(lengths: list[int], *, seed: int = 9) -> DataPlan:
    """Make a plan of unpacked rows; its fingerprint depends on their lengths and the seed."""
    return make_plan(draw(lengths, seed=seed), packed=False)


@contextmanager
def opened(
    folder: Path,
    *,
    streamed: bool = False,
    device: str = "cpu",
    copies_ahead: bool = False,
    hidden_gpu_bytes: int = 0,
) -> Iterator[Subject]:
    """Open a model folder in fp32."""
    source = open_source(str(folder))
    streaming = None
    if streamed:
        model = build_skeleton(source, dtype=torch.float32)
        streaming = Streaming(
            dtype=torch.float32,
            device=device,
            hidden_ram_bytes=1 << 20,
            scratch=folder.parent,
            copies_ahead=copies_ahead,
            hidden_gpu_bytes=hidden_gpu_bytes,
        )
    else:
        model = load_model(source, dtype=torch.float32, device=device, device_map=None)
    with Checkpoint.open(folder) as checkpoint:
        prepared = prepare(model, checkpoint, ())
        yield Subject(prepared, source, checkpoint, streaming)


def as_bytes(stats: CalibrationStats, folder: Path) -> bytes:
    """Return the bytes of the statistics file."""
    path = folder / "as_bytes.safetensors"
    save_stats(stats, path)
    return path.read_bytes()
