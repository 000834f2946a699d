"""Run batches through a model, and show their tensors to a recorder."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.calibration.header import BackOff
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.observe import Observe
from fp8calib.calibration.recorder import Recorder
from fp8calib.data.sequences import Batch, cut_batch
from fp8calib.errors import CalibrationError
from fp8calib.machine.allocator import return_freed_memory, return_memory_of
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import Role

_GPU_BATCHES_PER_CHECK = 16
"""How many batches on a GPU share one check for NaN, because each check waits for the device."""


class BatchObserver:
    """Shows the forward passes of batches to a recorder; made by `open_observer`."""

    def __init__(
        self, model: PreTrainedModel, recorder: Recorder, new_cache: Callable[[], HookedCache]
    ) -> None:
        self.decoder = Decoder(model)
        self.recorder = recorder
        self._new_cache = new_cache

    @contextmanager
    def observed(self, batch: Batch) -> Iterator[HookedCache]:
        """Observe a batch that is run with the given cache; an exception discards it."""
        rows, columns = batch.input_ids.shape
        view = BatchView(shape=(rows, columns), lengths=batch.lengths, first=batch.first)
        self.recorder.begin_batch(view)
        yield self._new_cache()
        self.recorder.end_batch()

    def check_if_due(self) -> bool:
        """Check where enough batches have run since the last check; tell whether it did."""
        on_cpu = self.decoder.device.type == "cpu"
        is_due = on_cpu or len(self.recorder.unchecked) >= _GPU_BATCHES_PER_CHECK
        if is_due:
            self.require_finite()
        return is_due

    def require_finite(self) -> None:
        """Check the batches since the last check.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names site and sample.
        """
        if (found := self.recorder.find_nonfinite()) is None:
            return
        site, sample = found
        what = {Role.INPUT: "the input of"}.get(site.role, f"{site.role} of")
        raise CalibrationError(
            f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
            hint="float16 overflows at 65504: try --dtype bfloat16"
            if self.decoder.dtype is torch.float16
            else "look at the weights before it, the embedding included, and at the sample",
        )

    def run_whole(
        self,
        batches: Iterable[Batch],
        advance: Callable[[int], None],
        *,
        on_checked: Callable[[], None],
        back_offs: list[BackOff],
    ) -> None:
        """Run all batches through the text decoder, never through the lm_head.

        A batch that does not fit into memory is halved, and so are all later ones; `back_offs`
        tells where. `on_checked` is called when all statistics are known to be finite.

        Raises:
            CalibrationError: an activation is NaN or inf (the message names layer and sample), or
                one sequence does not fit into memory.
        """
        waiting = deque(batches)
        most, has_run = sys.maxsize, False
        while waiting:
            batch = waiting.popleft()
            if len(batch.lengths) > most:
                waiting.extendleft(reversed(cut_into(batch, most)))
                continue
            if not self._fits(batch):
                return_memory_of(self.decoder.device)
                most = len(batch.lengths) // 2
                back_offs.append(BackOff(first=batch.first, batch_size=most))
                waiting.appendleft(batch)
                continue
            if not has_run:
                # The first batch allocates the statistics between its activations; later ones do
                # not.
                return_freed_memory()
                has_run = True
            advance(batch.num_tokens)
            if self.check_if_due():
                on_checked()
        self.require_finite()
        on_checked()

    def _fits(self, batch: Batch) -> bool:
        """Run a batch; False where it must be halved."""
        # The error holds the frames of the forward pass, and their tensors: memory is returned
        # after this function.
        try:
            with self.observed(batch) as cache:
                self.decoder.run(batch, cache)
        except OutOfMemoryInForward:
            if len(batch.lengths) == 1:
                raise
            return False
        return True


@contextmanager
def open_observer(
    prepared: PreparedModel, recorder: Recorder, observe: Observe
) -> Iterator[BatchObserver]:
    """Show the tensors of a model that `observe` names to a recorder while the context is open."""
    model, geometry, ignored = prepared.model, prepared.geometry, prepared.ignored
    config = model.config.get_text_config(decoder=True)
    attentions = geometry.owners()
    unseen = ignored if observe.kv else {each.module for each in attentions.values()}
    with open_hooks(
        model, geometry, recorder, query=observe.query, inputs=observe.inputs, ignored=ignored
    ):
        yield BatchObserver(
            model, recorder, lambda: HookedCache(config, attentions, unseen, recorder)
        )


def cut_into(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into batches of at most `size` sequences, without needless padding."""
    starts = range(0, len(batch.lengths), size)
    return [cut_batch(batch, start, start + size) for start in starts]
