"""The checkpoint of a streamed run: the statistics and hidden states after a layer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.checkpoint.disk import format_size
from fp8calib.data.sequences import Batch
from fp8calib.data.shares import sequence_ranges
from fp8calib.errors import ExportError
from fp8calib.geometry.sites import Site
from fp8calib.run.resume.journal import Journal
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_steps import LayerState
from fp8calib.stats.calibration_stats import STATS_NAME
from fp8calib.stats.merge import merge_sites
from fp8calib.stats.statistic import SiteStats

_INTERVAL_PER_COST = 20.0
_SHORTEST_INTERVAL_S = 2.0
_LAYER_NAME = "layer.json"
_DIGEST = "blake2b"


class LayerJournal:
    """A folder with the state after one layer, replaced as a whole by that of a later layer.

    Writing takes at most a twentieth of the run: after quick layers nothing is written.
    """

    def __init__(self, journal: Journal, batches: Sequence[Batch]) -> None:
        self._journal = journal
        self._stem = journal.layers_stem
        self._new_folder = self._stem.with_name(f"{self._stem.name}.new")
        self._sequences = sequence_ranges(batches)
        self._cost_s = 0.0
        self._saved_at = time.monotonic()
        self.sites: Mapping[Site, SiteStats] = {}
        """The statistics an earlier run gathered in its layers."""

    def load(self, store: HiddenStateStore) -> int:
        """Load what an earlier run of the same batches left, and give the first layer to run."""
        found = sorted(self._stem.parent.glob(f"{self._stem.name}-[0-9]*[0-9]"))
        if not found:
            return 0
        folder = found[-1]
        try:
            known = json.loads((folder / _LAYER_NAME).read_bytes())
            if [tuple(pair) for pair in known["sequences"]] != self._sequences:
                return 0  # of another number of processes
            sites = self._journal.load_file(folder / STATS_NAME).sites
            for number, digest in zip(range(len(self._sequences)), known["digests"], strict=True):
                store.put(number, _load_state(folder / _name_state(number), digest))
            layer = int(known["layer"])
        except Exception as error:  # noqa: BLE001 -- a torn file raises anything
            self._journal.warn(f"{folder.name} cannot be read, starting again: {error}")
            return 0
        self.sites = sites
        return layer + 1

    def save_if_due(
        self, layer: int, store: HiddenStateStore, sites: Mapping[Site, SiteStats]
    ) -> None:
        """Save the state after a layer, if the last checkpoint is old enough."""
        started = time.monotonic()
        interval_s = max(_SHORTEST_INTERVAL_S, _INTERVAL_PER_COST * self._cost_s)
        if started - self._saved_at < interval_s or not self._stem.parent.is_dir():
            return
        try:
            self._save(layer, store, sites)
        except (ExportError, OSError, RuntimeError) as error:  # torch.save's own is a RuntimeError
            shutil.rmtree(self._new_folder, ignore_errors=True)
            self._journal.warn(f"no checkpoint was written, the run continues: {error}")
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - started

    def _save(self, layer: int, store: HiddenStateStore, sites: Mapping[Site, SiteStats]) -> None:
        new = self._new_folder
        shutil.rmtree(new, ignore_errors=True)
        needed = store.ram_bytes + store.file_bytes
        if shutil.disk_usage(new.parent).free < needed:
            raise ExportError(
                f"{new.parent}: its disk has less than the {format_size(needed)} needed"
            )
        new.mkdir()
        digests = [
            _save_state(store.get(number, torch.device("cpu")), new / _name_state(number))
            for number in range(len(self._sequences))
        ]
        self._journal.save_file(new / STATS_NAME, merge_sites([self.sites, sites]))
        document = {"layer": layer, "sequences": self._sequences, "digests": digests}
        write_file_atomic(new / _LAYER_NAME, json.dumps(document).encode())
        kept = self._stem.with_name(f"{self._stem.name}-{layer:05}")
        shutil.rmtree(kept, ignore_errors=True)  # it exists only if it could not be used
        new.rename(kept)
        for folder in self._stem.parent.glob(f"{self._stem.name}-*"):
            if folder != kept:
                shutil.rmtree(folder, ignore_errors=True)


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


def _load_state(path: Path, digest: str) -> LayerState:
    with path.open("rb") as file:
        if hashlib.file_digest(file, _DIGEST).hexdigest() != digest:
            msg = f"{path.name} has changed since it was written"
            raise ValueError(msg)
        file.seek(0)
        return LayerState(*torch.load(file, weights_only=True))


def _name_state(number: int) -> str:
    return f"state-{number:06}.pt"
