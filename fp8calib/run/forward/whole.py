"""Run batches through a model that is whole in memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable

from fp8calib.data.sequences import Batch
from fp8calib.machine.allocator import return_freed_memory, return_memory_of
from fp8calib.run.forward.back_off import BackOff
from fp8calib.run.forward.decoder import OutOfMemoryInForward
from fp8calib.run.forward.observed_batches import BatchObserver, cut_into


def run_whole(
    observer: BatchObserver,
    batches: Iterable[Batch],
    advance: Callable[[int], None],
    *,
    on_checked: Callable[[], None],
    on_back_off: Callable[[BackOff], None],
) -> None:
    """Run all batches through the text decoder, never through the lm_head.

    A batch that does not fit into memory is halved, and so are all later ones.

    Args:
        observer: observes every batch.
        batches: the micro-batches.
        advance: called with the number of tokens of each batch.
        on_checked: called when all statistics are known to be finite.
        on_back_off: called when batches become smaller.

    Raises:
        CalibrationError: an activation is NaN or inf (the message names layer and sample), or one
            sequence does not fit into memory.
    """
    waiting = deque(batches)
    most, has_run = sys.maxsize, False
    while waiting:
        batch = waiting.popleft()
        if len(batch.lengths) > most:
            waiting.extendleft(reversed(cut_into(batch, most)))
            continue
        if not _fits(observer, batch):
            most = len(batch.lengths) // 2
            on_back_off(BackOff(first=batch.first, batch_size=most))
            waiting.appendleft(batch)
            continue
        if not has_run:
            # The first batch allocates the statistics between its activations; later ones do not.
            return_freed_memory()
            has_run = True
        advance(batch.num_tokens)
        if observer.check_if_due():
            on_checked()
    observer.require_finite()
    on_checked()


def _fits(observer: BatchObserver, batch: Batch) -> bool:
    """Run a batch; False where it must be halved."""
    try:
        with observer.observed(batch) as cache:
            observer.decoder.run(batch, cache)
    except OutOfMemoryInForward:
        if len(batch.lengths) == 1:
            raise
    else:
        return True
    return_memory_of(observer.decoder.device)
    return False
