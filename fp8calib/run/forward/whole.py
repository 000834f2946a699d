"""Run batches through a model that is whole in memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable

from fp8calib.data.sequences import Batch
from fp8calib.geometry.sites import Site
from fp8calib.machine.allocator import return_freed_memory, return_memory_of
from fp8calib.run.forward.back_off import BackOff
from fp8calib.run.forward.decoder import OutOfMemoryInForward
from fp8calib.run.forward.observed_batches import BatchObserver, cut_into


class WholeRunner:
    """Runs the text decoder (never the lm_head), every batch observed."""

    def __init__(self, observer: BatchObserver) -> None:
        self._observer = observer
        self._max_sequences = sys.maxsize
        self._has_run = False

    def run(
        self,
        batches: Iterable[Batch],
        advance: Callable[[int], None],
        *,
        on_checked: Callable[[], None],
        on_back_off: Callable[[BackOff], None],
    ) -> None:
        """Run all batches; halve one that does not fit into memory, and all later ones.

        Args:
            batches: the micro-batches.
            advance: called with the number of tokens of each batch.
            on_checked: called when all statistics are known to be finite.
            on_back_off: called when batches become smaller.

        Raises:
            CalibrationError: an activation is NaN or inf (the message names layer and sample), or
                one sequence does not fit into memory.
        """
        waiting, group = deque(batches), list[Batch]()
        while waiting:
            batch = waiting.popleft()
            if len(batch.lengths) > self._max_sequences:
                waiting.extendleft(reversed(cut_into(batch, self._max_sequences)))
                continue
            if group and group[-1].quarter != batch.quarter:
                group = self._check(group)
            if not self._fits(batch):
                self._max_sequences = len(batch.lengths) // 2
                on_back_off(BackOff(first=batch.first, batch_size=self._max_sequences))
                waiting.appendleft(batch)
                continue
            group.append(batch)
            advance(batch.num_tokens)
            if self._observer.is_check_due(group):
                group = self._check(group)
                on_checked()
        self._check(group)
        on_checked()

    def _fits(self, batch: Batch) -> bool:
        """Run a batch; False where it must be halved."""
        try:
            self._forward(batch)
        except OutOfMemoryInForward:
            if len(batch.lengths) == 1:
                raise
        else:
            return True
        return_memory_of(self._observer.decoder.device)
        return False

    def _forward(self, batch: Batch) -> None:
        with self._observer.observed(batch) as cache:
            self._observer.decoder.run(batch, cache)
        if not self._has_run:
            # The first batch allocates the statistics between its activations; later ones do not.
            return_freed_memory()
            self._has_run = True

    def _check(self, group: list[Batch]) -> list[Batch]:
        """Raise where a batch of the group had NaN or inf; give the next group, empty."""
        if self._observer.recorder.check_finite() is not None:
            raise self._observer.locate_nonfinite(group, self._find_nonfinite)
        return []

    def _find_nonfinite(self, sequence: Batch) -> Site | None:
        self._forward(sequence)
        return self._observer.recorder.check_finite()
