"""What `truth`, `architectures`, `foreign`, `cli` and `goldens` know of the product.

Beside these functions they use the command line, the functions of `fp8calib` and its errors.
Whoever moves code behind a door changes this file and none of their tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.calibration import calibrate
from fp8calib.calibration.calibration_stats import RunStats, SiteStats, merge_shards, save_stats
from fp8calib.calibration.hooks import HookedCache
from fp8calib.calibration.job import CalibrationJob, RunModel
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.stats_header import Observe
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import DataPlan, Share
from fp8calib.engines.transformers import report
from fp8calib.formats import compute
from fp8calib.model import geometry_from_class, topology
from fp8calib.model.geometry import Attention, Role, Site
from fp8calib.model.load import ModelSource, build_skeleton, find_longest, load_model, open_source
from fp8calib.model.prepared import PreparedModel, prepare
from fp8calib.model.tensor_parallel import check_linears
from fp8calib.numerics import positions
from fp8calib.numerics.formats import E4M3FN
from tests.zoo import draw

__all__ = ["Role", "Site", "find_longest"]

SEQ_LEN = 20
OBSERVE = Observe(weights=True)
LENGTHS = [7, 20, 13, 3, 20, 9, 20, 4, 11, 6, 18, 2, 15]
"""Thirteen sequences, the ninth in the histograms as well as the first; padded in batches."""


class Silent:
    """A progress bar that shows nothing."""

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        unit: str = "steps",
        layers: int = 0,
    ) -> None:
        """Begin a stage."""

    def advance(self, steps: int) -> None:
        """Count finished steps."""


# --- calibration ---------------------------------------------------------------------------------


def make_plan(sequences: Sequence[torch.Tensor], *, packed: bool = True) -> DataPlan:
    """Wrap token sequences (int64 [S] each) as the text of a run."""
    return DataPlan(
        sequences=tuple(sequences),
        packed=packed,
        seq_len=SEQ_LEN,
        sources=("test",),
        warnings=(),
    )


@dataclass
class WorkShare:
    """What a run does and what it leaves."""

    shard: Share | None = None
    journal: Journal | None = None
    back_offs: list[dict[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """A loaded model; `prepared` is what the product knows of it: `model`, `geometry`."""

    prepared: PreparedModel
    source: ModelSource
    checkpoint: Checkpoint
    mode: MemoryPlan
    device: str

    def job(self, plan: DataPlan, observe: Observe = OBSERVE, **more: Any) -> CalibrationJob:
        """Make a job whose model is held as the test says."""
        model = RunModel(
            name="test",
            source=self.source,
            checkpoint=self.checkpoint,
            prepared=self.prepared,
            device=self.device,
            dtype=str(self.prepared.model.dtype).removeprefix("torch."),
            dtype_why="",
            is_live=True,
        )
        more = {"progress": Silent(), **more}
        job = CalibrationJob(model=model, observe=observe, recipe_name="test", plan=plan, **more)
        vars(job)["mode"] = self.mode
        return job

    def calibrate(
        self,
        share: WorkShare | None = None,
        *,
        plan: DataPlan | None = None,
        batch_size: int = 2,
        observe: Observe = OBSERVE,
        progress: Silent | None = None,
    ) -> RunStats:
        """Calibrate it, on sequences of `LENGTHS` unless a plan is given."""
        share = share or WorkShare()
        job = self.job(
            *(plan or rows_of(LENGTHS), observe),
            asked_batch_size=batch_size,
            shard=share.shard,
            progress=progress or Silent(),
        )
        stats, cost = calibrate.run_calibration(job, share.journal)
        share.back_offs.extend(cost["batch_back_off"])
        return stats


def rows_of(lengths: list[int], *, seed: int = 9) -> DataPlan:
    """Make a plan of unpacked rows; its fingerprint depends on their lengths and the seed."""
    return make_plan(draw(lengths, seed=seed), packed=False)


@contextmanager
def opened(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    streamed: bool = False,
    device: str = "cpu",
    copies_ahead: bool = False,
    hidden_ram_bytes: int = 1 << 20,
    hidden_gpu_bytes: int = 0,
) -> Iterator[Subject]:
    """Open a model folder."""
    source = open_source(str(folder))
    mode = MemoryPlan()
    if streamed:
        model = build_skeleton(source, dtype=dtype)
        mode = MemoryPlan(
            is_streamed=True,
            hidden_ram_bytes=hidden_ram_bytes,
            scratch=folder.parent,
            copies_ahead=copies_ahead,
            hidden_gpu_bytes=hidden_gpu_bytes,
        )
    else:
        model = load_model(source, dtype=dtype, device=device, device_map=None)
    with Checkpoint.open(folder) as checkpoint:
        yield Subject(prepare(model, checkpoint, ()), source, checkpoint, mode, device)


def as_bytes(stats: RunStats, folder: Path) -> bytes:
    """Return the bytes of the statistics file."""
    path = folder / "as_bytes.safetensors"
    save_stats(stats, path)
    return path.read_bytes()


def run_calibration(
    folder: Path,
    plan: DataPlan,
    *,
    batch_size: int = 1,
    weights: bool = True,
    shard: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[Any, RunStats]:
    """Open, load and calibrate a folder, with all statistics.

    Gives what the product knows of the model (`model`, `geometry`), and its statistics
    (`sites[Site]` with `amax`, `count`, `histogram`, ...; `geometry`; `header.skipped`). `shard` is
    the number of the part, from 1, and that of all parts.
    """
    part = None if shard is None else Share(index=shard[0], count=shard[1])
    with opened(folder, **options) as subject:
        stats = subject.calibrate(
            WorkShare(shard=part),
            plan=plan,
            batch_size=batch_size,
            observe=Observe(weights=weights),
        )
        return subject.prepared, stats


def join_shards(shards: Sequence[RunStats]) -> RunStats:
    """Join the statistics of all shards of a run."""
    return merge_shards([(str(number), stats) for number, stats in enumerate(shards)])


def list_tensors(stats: RunStats) -> dict[str, torch.Tensor]:
    """List the tensors of statistics as `SITE/NAME`; counts of tokens too."""
    named = {f"{site}/count": torch.tensor(seen.count) for site, seen in stats.sites.items()}
    for site, seen in stats.sites.items():
        named |= {f"{site}/{name}": tensor for name, tensor in seen.tensors.items()}
    return named


@contextmanager
def short_positions(first: int) -> Iterator[None]:
    """Let the first range of token positions have `first` tokens: short texts then have several."""
    with pytest.MonkeyPatch.context() as patch:
        shorter = [start * first // positions.FIRST_RANGE for start in positions.RANGE_STARTS]
        patch.setattr(positions, "RANGE_STARTS", shorter)
        yield


def split_positions(length: int) -> list[tuple[int, int]]:
    """List the ranges of token positions of a sequence."""
    return positions.split_positions(length)


NUM_RANGES = positions.NUM_RANGES


def observe_cache(config: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store K and V ([B, H, S, D]) of a layer with 2 heads of K (size 16) and V (size 8)."""
    attention = Attention(
        module="layers.0.attn",
        checkpoint_module="layers.0.attn",
        kind="heads",
        num_heads=4,
        num_kv_heads=2,
        k_head_dim=16,
        v_head_dim=8,
    )
    cache = HookedCache(config, {0: attention}, (), Recorder(1))
    cache.update(key, value, 0)


def replace_amax(path: Path, made: Mapping[str, torch.Tensor]) -> None:
    """Overwrite tensors of a stats file, by `SITE/amax`, `SITE/amax_in` or `SITE/experts`."""
    from fp8calib.commands.stats import load_stats  # noqa: PLC0415 -- the public one takes shards too

    stats = load_stats(path)
    sites = {}
    for site, seen in stats.sites.items():
        tensors = {name: made.get(f"{site}/{name}", x) for name, x in seen.tensors.items()}
        sites[site] = SiteStats(count=seen.count, **tensors)
    changed = RunStats(header=stats.header, sites=sites, shard=stats.shard)
    save_stats(changed, path)


# --- models --------------------------------------------------------------------------------------


def find_text_decoder(model: Any) -> tuple[str, Any]:
    """Find the module that runs text, and its path."""
    return topology.find_text_decoder(model)


def find_geometry(model: Any) -> Any:
    """Find the layers, attention and linears of a model in memory."""
    names = {name: name for name, _ in model.named_parameters()}
    geometry, _ = topology.find_geometry(model, names, checkpoint_dtype="float32")
    return geometry


def list_parameters(folder: Path, *, loaded: bool) -> dict[str, tuple[int, ...]]:
    """List the parameters of the model of a folder, loaded or built without weights."""
    source = open_source(str(folder))
    if loaded:
        model = load_model(source, dtype=torch.float32, device="cpu", device_map=None)
    else:
        model = build_skeleton(source)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def refuse_source(folder: Path) -> None:
    """Open a folder that holds no model to calibrate, which is an error."""
    open_source(str(folder))


@contextmanager
def ask_once() -> Iterator[None]:
    """Let transformers answer once about equal checkpoints and equal configs, for speed."""
    from tests.kit.answers import ask_transformers, build_skeleton  # noqa: PLC0415 -- patched then

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "report_transformers", ask_transformers)
        patch.setattr(geometry_from_class, "build_skeleton", build_skeleton)
        yield


# --- scales --------------------------------------------------------------------------------------


def kv_scales(stats: RunStats, *, tp: int = 1) -> dict[Site, list[float]]:
    """Compute the scales of K and V, one a rank."""
    table = compute.compute_kv_scales(stats, E4M3FN, tp=tp)
    return {site: scale.values.tolist() for site, scale in table.scales.items()}


def linear_scales(stats: RunStats, *, tp: int = 1) -> dict[Site, list[float]]:
    """Compute the scales of weights and inputs, one a rank."""
    table = compute.compute_linear_scales(stats, E4M3FN, tp=tp)
    return {site: scale.values.tolist() for site, scale in table.scales.items()}


def check_degree(geometry: Any, tp: int) -> None:
    """Refuse a tensor-parallel degree that cuts no linear evenly."""
    check_linears(geometry, tp)
