"""Checkpoints of a run, from which a later run resumes.

A whole model's run saves the statistics of the batches that it has finished; a streamed run saves
those of its finished layers, and the hidden states after the last of them. No batch runs twice, and
the result is the same byte for byte as without an interruption.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from fp8calib.calibration.calibration_stats import (
    RunStats,
    SiteStats,
    join_ranges,
    load_stats_file,
    merge_sites,
    save_stats,
)
from fp8calib.calibration.origin import STATS_NAME
from fp8calib.calibration.stats_header import StatsHeader, StatsShard
from fp8calib.checkpoint.output import require_free_space
from fp8calib.data.sequences import Batch, Share, sequence_ranges
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.model.geometry import Site

if TYPE_CHECKING:  # a model in memory needs none of it
    from fp8calib.calibration.layer_steps import HiddenStateStore

NAME_PREFIX = "checkpoint-"
"""The prefix of the names of checkpoints, which are removed when the run is finished."""
INTERVAL_S = 10.0
"""A killed run loses at most this much work, and the batch or layer that is running."""
LAYER_INTERVAL_PER_COST = 20.0
"""Hidden states are large: writing them takes at most a twentieth of the run."""

_STATE_NAME = "state-{:06}.pt"

Ranges = tuple[tuple[int, int], ...]
"""Sequences, as half-open ranges of global indices."""


class Journal:
    """The checkpoints of one run, in a folder; each process rewrites its own.

    Attributes:
        folder: where they are; without one, none are written.
        sequences: those that earlier runs have done.
        sites: the statistics of these sequences; empty in all processes but the first.
        layer_sites: the statistics of the layers that an earlier streamed run has done.
        has_layers: whether an earlier streamed run has left hidden states.
    """

    def __init__(
        self,
        folder: Path,
        header: StatsHeader,
        share: Share,
        batch_size: int,
        *,
        rank: int,
        warn: Callable[[str], None] = print,
        sequences: Ranges = (),
    ) -> None:
        self.folder = folder
        self.sequences = sequences
        self.sites: Mapping[Site, SiteStats] = {}
        self.layer_sites: Mapping[Site, SiteStats] = {}
        self.has_layers = False
        self.warn = warn
        self._header = header
        self._shard = StatsShard(
            index=share.index,
            count=share.count,
            batch_size=batch_size,
            sequences=(),
            is_checkpoint=True,
        )
        self._layers_stem = f"{NAME_PREFIX}layers-{rank}"
        self._cost_s = 0.0
        self._saved_at = time.monotonic()

    def load(self) -> None:
        """Load the checkpoints that earlier runs of the same calibration have left."""
        for path in self.folder.glob(f"{NAME_PREFIX}layers-*[0-9]/{STATS_NAME}"):
            self._read(path)  # check only: `load_layer` loads it
            self.has_layers = True
        found = [self._read(path) for path in self.folder.glob(f"{NAME_PREFIX}*.safetensors")]
        kept: list[Mapping[Site, SiteStats]] = []
        for sites, shard in sorted(found, key=lambda each: -each[1].num_sequences):
            try:
                self.sequences = join_ranges([*self.sequences, *shard.sequences])
            except ValueError:  # it repeats a sequence: a process may have outlived its run
                continue
            kept.append(sites)
        self.sites = merge_sites(kept)

    def remove(self) -> None:
        """Remove all checkpoints."""
        for path in self.folder.glob(f"{NAME_PREFIX}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save_if_due(
        self, sequences: Ranges, make_sites: Callable[[], dict[Site, SiteStats]]
    ) -> None:
        """Save the statistics of sequences, all finite, if the last checkpoint is old enough."""
        if self.is_due(INTERVAL_S):
            with self._writing():
                ranges = join_ranges(list(sequences))
                path = self.folder / f"{NAME_PREFIX}{ranges[0][0]:08}.safetensors"
                self._save_stats(path, make_sites(), ranges)

    def load_layer(self, batches: Sequence[Batch], store: HiddenStateStore) -> int:
        """Load what an earlier run of these batches saved; give the first layer to run."""
        self.layer_sites = {}
        folders = sorted(self.folder.glob(f"{self._layers_stem}-[0-9]*[0-9]"))
        if not folders:
            return 0
        try:
            sites, shard = self._read(folders[-1] / STATS_NAME)
            if shard.sequences != tuple(sequence_ranges(batches)):
                return 0  # of another number of processes
            for number in range(len(batches)):
                state = torch.load(folders[-1] / _STATE_NAME.format(number), weights_only=True)
                store.put(number, state)
        except Exception as error:  # noqa: BLE001 -- a torn file raises anything
            self.warn(f"{folders[-1].name} cannot be read, starting again: {error}")
            return 0
        self.layer_sites = sites
        return int(folders[-1].name.rpartition("-")[2]) + 1

    def save_layer(
        self,
        layer: int,
        batches: Sequence[Batch],
        store: HiddenStateStore,
        make_sites: Callable[[], dict[Site, SiteStats]],
    ) -> None:
        """Save the state after a layer, and remove that of an earlier layer."""
        new = self.folder / f"{self._layers_stem}.new"
        kept = self.folder / f"{self._layers_stem}-{layer:05}"
        shutil.rmtree(new, ignore_errors=True)
        with self._writing():
            require_free_space(self.folder, store.gpu_bytes + store.ram_bytes + store.file_bytes)
            new.mkdir()
            for number in range(len(batches)):
                # written through to the disk, out of shared memory, with the same strides
                state = pytree.tree_map_only(
                    torch.Tensor,
                    lambda tensor: torch.empty_like(tensor).copy_(tensor),
                    store.get(number, torch.device("cpu")),
                )
                with (new / _STATE_NAME.format(number)).open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            sites = merge_sites([self.layer_sites, make_sites()])
            self._save_stats(new / STATS_NAME, sites, sequence_ranges(batches))
            shutil.rmtree(kept, ignore_errors=True)  # it exists only if it could not be used
            new.rename(kept)
            for folder in self.folder.glob(f"{self._layers_stem}-*"):
                if folder != kept:
                    shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(new, ignore_errors=True)

    def is_due(self, interval_s: float | None = None) -> bool:
        """Whether enough time has passed since the last checkpoint; None: to save a layer's."""
        if interval_s is None:
            interval_s = max(INTERVAL_S, LAYER_INTERVAL_PER_COST * self._cost_s)
        # the first process may have the folder on another machine
        return time.monotonic() - self._saved_at >= interval_s and self.folder.is_dir()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Time the writing of a checkpoint; if it fails, warn, and let the run continue."""
        started = time.monotonic()
        try:
            yield
        except (ExportError, OSError, RuntimeError) as error:  # torch.save's own is a RuntimeError
            why = error.message if isinstance(error, ExportError) else error
            self.warn(f"no checkpoint was written, the run continues: {why}")
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - started

    def _save_stats(
        self, path: Path, sites: Mapping[Site, SiteStats], sequences: Sequence[tuple[int, int]]
    ) -> None:
        shard = self._shard.model_copy(update={"sequences": tuple(sequences)})
        save_stats(RunStats(header=self._header, sites=sites, shard=shard), path)

    def _read(self, path: Path) -> tuple[Mapping[Site, SiteStats], StatsShard]:
        """Read the statistics of an earlier run; refuse those of another calibration."""
        again = f"to start again, remove {self.folder}"
        try:
            stats = load_stats_file(path, accepts_shard=True)
        except ModelError as error:
            error.hint = again
            raise
        own, here = stats.shard, self._shard
        assert own is not None  # noqa: S101 -- `_save_stats` writes no other
        difference = stats.header.explain_other(self._header) or own.explain_other(here)
        if not difference and own.index != here.index:
            difference = f"{own.describe()}, and {here.describe()}"
        if difference:
            raise UsageError(
                f"{self.folder}: the interrupted run was another calibration: {difference}",
                hint=f"repeat its command line; {again}",
            )
        return stats.sites, own
