"""Checkpoints of a run, from which a later run resumes.

A whole model's run saves the statistics of the batches that it has finished; a streamed run saves
those of its finished layers, and the hidden states after the last of them. No batch runs twice, and
the result is the same byte for byte as without an interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch.utils import _pytree as pytree

from fp8calib.calibration.calibration_stats import (
    STATS_NAME,
    CalibrationStats,
    join_ranges,
    load_stats,
    save_stats,
)
from fp8calib.calibration.header import StatsHeader, StatsShard
from fp8calib.calibration.hidden_states import HiddenStateStore
from fp8calib.calibration.layer_steps import LayerState
from fp8calib.calibration.merge import explain_other_run
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.checkpoint.disk import format_size
from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.data.sequences import Batch
from fp8calib.data.shares import Share, sequence_ranges
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.model.shapes import Role, Site

NAME_PREFIX = "checkpoint-"
"""The prefix of the names of checkpoints, which are removed when the run is finished."""
INTERVAL_S = 10.0
"""A killed run loses at most so much work and the running batch or layer."""
LAYER_INTERVAL_PER_COST = 20.0
"""Hidden states are large: writing them takes at most a twentieth of the run."""
_LAYER_NAME = "layer.json"
_DIGEST = "blake2b"

Ranges = tuple[tuple[int, int], ...]
"""Sequences, as half-open ranges of global indices."""


class StatsSoFar(Protocol):
    """The statistics of a run so far."""

    @property
    def sequences(self) -> Ranges:
        """The sequences that they cover."""

    @property
    def is_settled(self) -> bool:
        """Whether every sequence counts fully or not at all."""

    def find_nonfinite(self) -> tuple[Site, int] | None:
        """Find a site and a sequence with NaN or inf."""

    def stats(self) -> dict[Site, SiteStats]:
        """Give them."""


class Journal:
    """The checkpoints of one run, in a folder; each process rewrites its own.

    Attributes:
        folder: where they are.
        sequences: those that earlier runs have done.
        weights: paths of the linears whose weights earlier runs have read.
        sites: the statistics of these sequences and weights; not in processes but the first.
        layer_sites: the statistics of the layers that an earlier streamed run has done.
        has_layers: whether an earlier streamed run has left hidden states.
    """

    def __init__(
        self,
        folder: Path,
        header: StatsHeader,
        *,
        shard: Share | None,
        batch_size: int,
        warn: Callable[[str], None],
        rank: int = 0,
        sequences: Ranges = (),
        weights: Collection[str] = (),
    ) -> None:
        self.sequences = sequences
        self.weights = frozenset(weights)
        self.sites: dict[Site, SiteStats] = {}
        self.layer_sites: Mapping[Site, SiteStats] = {}
        self.has_layers = False
        self.warn = warn
        share = shard or Share()
        self._shard = StatsShard(
            index=share.index,
            count=share.count,
            batch_size=batch_size,
            sequences=(),
            is_checkpoint=True,
        )
        self._empty = CalibrationStats(header=header, sites={})
        self.folder = folder
        self._rank = rank
        self._cost_s = 0.0
        self._has_written = False
        self._saved_at = time.monotonic()

    def load(self) -> None:
        """Load the checkpoints that earlier runs of the same calibration have left.

        Raises:
            UsageError: they are of another calibration; the message names the difference.
            ModelError: a file is damaged.
        """
        paths = sorted(self.folder.glob(f"{NAME_PREFIX}*.safetensors"))
        found = [self._read(path) for path in paths]
        for path in self.folder.glob(f"{NAME_PREFIX}layers-*[0-9]/{STATS_NAME}"):
            self._read(path)  # check only: `load_layer` loads it
            self.has_layers = True
        kept: list[Mapping[Site, SiteStats]] = []
        for sites, sequences in sorted(found, key=lambda each: -count_sequences(each[1])):
            try:
                self.sequences = join_ranges([*self.sequences, *sequences])
            except ValueError:  # it repeats a sequence: a process may have outlived its run
                continue
            kept.append(sites)
        self.sites = merge_sites(kept)
        self.weights = frozenset(site.module for site in self.sites if site.role is Role.WEIGHT)

    def remove(self) -> None:
        """Remove all checkpoints."""
        for path in self.folder.glob(f"{NAME_PREFIX}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _is_due(self, interval_s: float) -> bool:
        # the first process may have the folder on another machine
        return time.monotonic() - self._saved_at >= interval_s and self.folder.is_dir()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Measure what a checkpoint costs; a run continues without one that cannot be written."""
        started = time.monotonic()
        try:
            yield
        except (ExportError, OSError, RuntimeError) as error:  # torch.save's own is a RuntimeError
            why = error.message if isinstance(error, ExportError) else error
            self.warn(f"no checkpoint was written, the run continues: {why}")
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - started

    # --- whole models -----------------------------------------------------------------------------

    def save_weights(self, sites: Mapping[Site, SiteStats], *, duration_s: float) -> None:
        """Save the statistics of weights, if reading them took long enough."""
        if sites and duration_s >= INTERVAL_S:
            self._write(f"weights-{self._rank}", sites, ())

    @contextmanager
    def saving(self, measured: StatsSoFar) -> Iterator[None]:
        """Save what `save_if_due` has not, at the end and after an interruption."""
        try:
            yield
        except KeyboardInterrupt:
            if measured.is_settled and measured.find_nonfinite() is None:
                self._save(measured)
            raise
        if self._has_written:
            self._save(measured)

    def save_if_due(self, measured: StatsSoFar) -> None:
        """Save statistics, all finite, if the last checkpoint is old enough."""
        if self._is_due(INTERVAL_S):
            self._save(measured)

    def _save(self, measured: StatsSoFar) -> None:
        if sequences := measured.sequences:
            first = min(first for first, _ in sequences)
            self._write(f"{first:08}", measured.stats(), join_ranges(list(sequences)))
            self._has_written = True

    def _write(self, name: str, sites: Mapping[Site, SiteStats], sequences: Ranges) -> None:
        if self.folder.is_dir():  # else the first process has it on another machine
            with self._writing():
                path = self.folder / f"{NAME_PREFIX}{name}.safetensors"
                self._save_stats(path, sites, sequences)

    # --- streamed models --------------------------------------------------------------------------

    def load_layer(self, batches: Sequence[Batch], store: HiddenStateStore) -> int:
        """Load what an earlier run of these batches left, and give the first layer to run."""
        self.layer_sites = {}
        folders = sorted(self.folder.glob(f"{NAME_PREFIX}layers-{self._rank}-[0-9]*[0-9]"))
        if not folders:
            return 0
        try:
            known = json.loads((folders[-1] / _LAYER_NAME).read_bytes())
            if [tuple(pair) for pair in known["sequences"]] != sequence_ranges(batches):
                return 0  # of another number of processes
            sites, _ = self._read(folders[-1] / STATS_NAME)
            for number, digest in zip(range(len(batches)), known["digests"], strict=True):
                with (folders[-1] / _name_state(number)).open("rb") as file:
                    if hashlib.file_digest(file, _DIGEST).hexdigest() != digest:
                        raise ModelError(f"{Path(file.name).name} has changed since it was written")
                    file.seek(0)
                    store.put(number, LayerState(*torch.load(file, weights_only=True)))
            layer = int(known["layer"])
        except Exception as error:  # noqa: BLE001 -- a torn file raises anything
            self.warn(f"{folders[-1].name} cannot be read, starting again: {error}")
            return 0
        self.layer_sites = sites
        return layer + 1

    def save_layer(
        self, layer: int, batches: Sequence[Batch], store: HiddenStateStore, measured: StatsSoFar
    ) -> None:
        """Save the state after a layer in a folder, if the last one is old enough.

        It replaces that of an earlier layer as a whole.
        """
        if not self._is_due(max(INTERVAL_S, LAYER_INTERVAL_PER_COST * self._cost_s)):
            return
        stem = f"{NAME_PREFIX}layers-{self._rank}"
        new, kept = self.folder / f"{stem}.new", self.folder / f"{stem}-{layer:05}"
        shutil.rmtree(new, ignore_errors=True)
        with self._writing():
            needed = store.ram_bytes + store.file_bytes
            if shutil.disk_usage(self.folder).free < needed:
                raise ExportError(
                    f"{self.folder}: its disk has less than the {format_size(needed)} needed"
                )
            new.mkdir()
            states = (store.get(number, torch.device("cpu")) for number in range(len(batches)))
            digests = [
                _save_state(state, new / _name_state(number)) for number, state in enumerate(states)
            ]
            self._save_stats(
                new / STATS_NAME, merge_sites([self.layer_sites, measured.stats()]), ()
            )
            known = {"layer": layer, "sequences": sequence_ranges(batches), "digests": digests}
            write_file_atomic(new / _LAYER_NAME, json.dumps(known).encode())
            shutil.rmtree(kept, ignore_errors=True)  # it exists only if it could not be used
            new.rename(kept)
            for folder in self.folder.glob(f"{stem}-*"):
                if folder != kept:
                    shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(new, ignore_errors=True)

    # --- files ------------------------------------------------------------------------------------

    def _save_stats(self, path: Path, sites: Mapping[Site, SiteStats], sequences: Ranges) -> None:
        shard = self._shard.model_copy(update={"sequences": sequences})
        save_stats(replace(self._empty, sites=sites, shard=shard), path)

    def _read(self, path: Path) -> tuple[Mapping[Site, SiteStats], Ranges]:
        """Read the statistics of an earlier run, and the sequences that they cover."""
        try:
            stats = load_stats(path, accepts_shard=True)
        except ModelError as error:
            raise ModelError(error.message, hint="leave out --resume to start again") from error
        if (own := stats.shard) is None:
            raise ModelError("a checkpoint holds complete statistics", hint="leave out --resume")
        here = self._shard
        difference = explain_other_run(stats.header, self._empty.header)
        if not difference and (own.index, own.count) != (here.index, here.count):
            difference = f"{own.describe()}, and {here.describe()}"
        elif not difference and own.count > 1 and own.batch_size != here.batch_size:
            difference = (
                f"--batch-size {own.batch_size}, and {here.batch_size}: the shards depend on it"
            )
        if difference:
            raise UsageError(
                f"{self.folder}: the interrupted run was another calibration: {difference}",
                hint="repeat its command line, or leave out --resume to start again",
            )
        return stats.sites, own.sequences


def is_checkpoint(path: Path) -> bool:
    """Whether a file or folder is a checkpoint of a run."""
    return path.name.startswith(NAME_PREFIX)


def count_sequences(sequences: Ranges) -> int:
    """Count the sequences of ranges."""
    return sum(stop - first for first, stop in sequences)


def _save_state(state: LayerState, path: Path) -> str:
    """Write a state through to the disk, and give its digest.

    Tensors are copied out of shared memory, with their strides.
    """
    copied = pytree.tree_map_only(
        torch.Tensor, lambda tensor: torch.empty_like(tensor).copy_(tensor), tuple(state)
    )
    with path.open("w+b") as file:
        torch.save(copied, file)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return hashlib.file_digest(file, _DIGEST).hexdigest()


def _name_state(number: int) -> str:
    return f"state-{number:06}.pt"
