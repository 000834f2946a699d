"""Checkpoints of the statistics of a run, from which a later run resumes.

Each checkpoint holds part of the statistics (`fp8calib.stats.merge`). No batch runs twice, and the
result is the same byte for byte as without an interruption.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from fp8calib.data.shares import Share
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.geometry.sites import Role, Site
from fp8calib.stats.calibration_stats import (
    STATS_NAME,
    CalibrationStats,
    StatsHeader,
    StatsShard,
    join_ranges,
    load_stats,
    save_stats,
)
from fp8calib.stats.merge import explain_other_run, merge_sites
from fp8calib.stats.statistic import SiteStats

LONGEST_INTERVAL_S = 10.0
"""A killed run loses at most this much work and the running batch."""
_SHORTEST_INTERVAL_S = 1.0
_INTERVAL_PER_COST = 50.0
NAME_PREFIX = "checkpoint-"
"""The prefix of the names of checkpoints, which are removed when the run is finished."""
_WORTH_SAVING_S = 1.0
"""Weights that were read faster than this are not saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The work that earlier runs have done."""

    sequences: tuple[tuple[int, int], ...]
    weights: frozenset[str]
    """Paths of the linears whose weights were read."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return sum(stop - first for first, stop in self.sequences)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"sequences": self.sequences, "weights": sorted(self.weights)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Convert from JSON values."""
        return cls(
            sequences=tuple((first, stop) for first, stop in document["sequences"]),
            weights=frozenset(document["weights"]),
        )


NOTHING = Done(sequences=(), weights=frozenset())


class StatsSoFar(Protocol):
    """The statistics of a run so far."""

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The sequences that they cover, as half-open ranges."""

    @property
    def is_settled(self) -> bool:
        """Whether every sequence counts fully or not at all."""

    def find_nonfinite(self) -> tuple[Site, int] | None:
        """Find a site and a sequence with NaN or inf."""

    def stats(self) -> dict[Site, SiteStats]:
        """Give them."""


class Journal:
    """The checkpoints of one run, in a folder; each process rewrites its own file."""

    def __init__(
        self,
        folder: Path,
        header: StatsHeader,
        text_hashes: torch.Tensor,
        *,
        shard: Share | None,
        batch_size: int,
        warn: Callable[[str], None],
        rank: int = 0,
        done: Done = NOTHING,
    ) -> None:
        self.header = header
        self.done = done
        """The work that earlier runs have done."""
        self.sites: dict[Site, SiteStats] = {}
        """The statistics of earlier runs."""
        self._folder = folder
        self._text_hashes = text_hashes
        share = shard or Share()
        self._shard = StatsShard(
            index=share.index,
            count=share.count,
            batch_size=batch_size,
            sequences=(),
            is_checkpoint=True,
        )
        self.warn = warn
        self._rank = rank
        self.layers_stem = folder / f"{NAME_PREFIX}layers-{rank}"
        """The path, without its suffix, of the folders of a streamed run (`LayerJournal`)."""
        self._cost_s = 0.0
        self._has_written = False
        self._saved_at = self._called_at = time.monotonic()

    def load(self) -> None:
        """Load the checkpoints that earlier runs of the same calibration have left.

        Raises:
            UsageError: they are of another calibration; the message names the difference.
            ModelError: a file is damaged.
        """
        found = _drop_repeated(
            [
                self.load_file(path)
                for path in sorted(self._folder.glob(f"{NAME_PREFIX}*.safetensors"))
            ]
        )
        for path in self._folder.glob(f"{NAME_PREFIX}layers-*[0-9]/{STATS_NAME}"):
            self.load_file(path)  # check only: a `LayerJournal` loads it
        self.sites = merge_sites(stats.sites for stats in found)
        self.done = Done(
            sequences=join_ranges([each for stats in found for each in _shard_of(stats).sequences]),
            weights=frozenset(site.module for site in self.sites if site.role is Role.WEIGHT),
        )

    def save_weights(self, sites: Mapping[Site, SiteStats], *, duration_s: float) -> None:
        """Save the statistics of weights, if reading them took long enough."""
        if sites and duration_s >= _WORTH_SAVING_S:
            self._write(f"weights-{self._rank}", sites, ())

    def save_if_due(self, measured: StatsSoFar) -> None:
        """Save statistics, all finite, if the last checkpoint is old enough."""
        now = time.monotonic()
        since_call, self._called_at = now - self._called_at, now
        interval_s = max(_SHORTEST_INTERVAL_S, _INTERVAL_PER_COST * self._cost_s)
        if now + since_call >= self._saved_at + min(interval_s, LONGEST_INTERVAL_S):
            self._save(measured)

    def save_final(self, measured: StatsSoFar) -> None:
        """Save the final statistics, if the run has written checkpoints before."""
        if self._has_written:
            self._save(measured)

    def save_interrupted(self, measured: StatsSoFar) -> None:
        """Save the statistics after an interruption, if they are consistent."""
        if measured.is_settled and measured.find_nonfinite() is None:
            self._save(measured)

    def remove(self) -> None:
        """Remove all checkpoints."""
        for path in self._folder.glob(f"{NAME_PREFIX}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def has_layers(self) -> bool:
        """Whether a streamed run has left hidden states."""
        return any(self._folder.glob(f"{NAME_PREFIX}layers-*/{STATS_NAME}"))

    def save_file(self, path: Path, sites: Mapping[Site, SiteStats]) -> None:
        """Write statistics that cover no whole sequence, such as those of some layers.

        Raises:
            ExportError: they cannot be written.
        """
        save_stats(self._make_stats(sites, ()), path)

    def _save(self, measured: StatsSoFar) -> None:
        sequences = measured.sequences
        if sequences:
            first = min(first for first, _ in sequences)
            self._write(f"{first:08}", measured.stats(), join_ranges(list(sequences)))
            self._has_written = True

    def _write(
        self, name: str, sites: Mapping[Site, SiteStats], sequences: tuple[tuple[int, int], ...]
    ) -> None:
        started = time.monotonic()
        stats = self._make_stats(sites, sequences)
        if not self._folder.is_dir():  # the first process has it on another machine
            return
        try:
            save_stats(stats, self._folder / f"{NAME_PREFIX}{name}.safetensors")
        except ExportError as error:
            self.warn(f"no checkpoint was written, the run continues: {error.message}")
        self._saved_at = self._called_at = time.monotonic()
        self._cost_s = self._saved_at - started

    def _make_stats(
        self, sites: Mapping[Site, SiteStats], sequences: tuple[tuple[int, int], ...]
    ) -> CalibrationStats:
        return CalibrationStats(
            header=self.header,
            sites=sites,
            text_hashes=self._text_hashes,
            shard=self._shard.model_copy(update={"sequences": sequences}),
        )

    def load_file(self, path: Path) -> CalibrationStats:
        """Load a checkpoint of an earlier run.

        Raises:
            UsageError: it is of another calibration; the message names the difference.
            ModelError: the file is damaged.
        """
        try:
            stats = load_stats(path, accepts_shard=True)
        except ModelError as error:
            raise ModelError(error.message, hint="leave out --resume to start again") from error
        difference = explain_other_run(stats.header, self.header) or self._explain_other_shard(
            stats
        )
        if difference:
            raise UsageError(
                f"{self._folder}: the interrupted run was another calibration: {difference}",
                hint="repeat its command line, or leave out --resume to start again",
            )
        return stats

    def _explain_other_shard(self, stats: CalibrationStats) -> str:
        found, here = _shard_of(stats), self._shard
        if (found.index, found.count) != (here.index, here.count):
            return f"{found.describe()}, and {here.describe()}"
        if found.count > 1 and found.batch_size != here.batch_size:
            return (
                f"--batch-size {found.batch_size}, and {here.batch_size}: the shards depend on it"
            )
        return ""


def _drop_repeated(found: Sequence[CalibrationStats]) -> list[CalibrationStats]:
    """Drop checkpoints that repeat a sequence: a process may have outlived its run."""
    kept: list[CalibrationStats] = []
    for stats in sorted(found, key=lambda stats: -_shard_of(stats).num_sequences):
        known = [each for other in kept for each in _shard_of(other).sequences]
        try:
            join_ranges([*known, *_shard_of(stats).sequences])
        except ValueError:
            continue
        kept.append(stats)
    return kept


def is_checkpoint(path: Path) -> bool:
    """Whether a file or folder is a checkpoint of a run."""
    return path.name.startswith(NAME_PREFIX)


def _shard_of(stats: CalibrationStats) -> StatsShard:
    if stats.shard is None:
        raise ModelError("a checkpoint holds complete statistics", hint="leave out --resume")
    return stats.shard
