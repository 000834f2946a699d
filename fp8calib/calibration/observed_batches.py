"""Run batches through a model, and show their tensors to a recorder."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from transformers import PreTrainedModel

from fp8calib.calibration.allocator import return_freed_memory, return_memory_of
from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.calibration.header import BackOff
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.journal import INTERVAL_S, Journal
from fp8calib.calibration.observe import Observe
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import Recorder
from fp8calib.data.sequences import Batch, cut_batch
from fp8calib.errors import CalibrationError
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import Role

_GPU_BATCH_TOKENS = 8192
"""About as many keep a GPU busy; the same on every GPU, so that shards and resumed runs agree."""


def choose_batch_size(device: str, seq_len: int) -> int:
    """Choose how many sequences a batch has where the user does not."""
    return 1 if device == "cpu" else max(1, _GPU_BATCH_TOKENS // seq_len)


class BatchObserver:
    """Shows the forward passes of batches to a recorder; made by `open_observer`."""

    def __init__(
        self, model: PreTrainedModel, recorder: Recorder, new_cache: Callable[[], HookedCache]
    ) -> None:
        self.decoder = Decoder(model)
        self.recorder = recorder
        self._new_cache = new_cache
        self._checked_at = time.monotonic()

    @contextmanager
    def observed(self, batch: Batch) -> Iterator[HookedCache]:
        """Observe a batch that is run with the given cache; an exception discards it."""
        rows, columns = batch.input_ids.shape
        view = BatchView(shape=(rows, columns), lengths=batch.lengths, first=batch.first)
        self.recorder.begin_batch(view)
        yield self._new_cache()
        self.recorder.end_batch()

    def check(self, *, at_end: bool = False) -> bool:
        """Check the batches since the last check, on a GPU if it was long ago; tell whether it did.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names site and sample.
        """
        now = time.monotonic()
        is_gpu = self.decoder.device.type != "cpu"
        # each look waits for the device; a checkpoint is written behind one
        if is_gpu and not at_end and now < self._checked_at + INTERVAL_S / 2:
            return False
        self._checked_at = now
        if (found := self.recorder.find_nonfinite()) is None:
            return True
        site, sample = found
        what = "the input of" if site.role is Role.INPUT else f"{site.role} of"
        raise CalibrationError(
            f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
            hint="float16 overflows at 65504: try --dtype bfloat16"
            if self.decoder.dtype is torch.float16
            else "look at the weights before it, the embedding included, and at the sample",
        )

    def run_whole(
        self,
        batches: Sequence[Batch],
        progress: Progress,
        journal: Journal | None,
        back_offs: list[BackOff],
    ) -> None:
        """Run all batches through the text decoder, never through the lm_head.

        A batch that does not fit into memory is halved, and so are all later ones; `back_offs`
        tells where.

        Raises:
            CalibrationError: an activation is NaN or inf (the message names layer and sample), or
                one sequence does not fit into memory.
        """
        num_tokens = sum(batch.num_tokens for batch in batches)
        progress.stage("calibrating", num_tokens, unit="tokens", batches=len(batches))
        waiting, most, has_run = deque(batches), sys.maxsize, False
        with nullcontext() if journal is None else journal.saving(self.recorder):
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
                    # The first batch allocates the statistics between its activations; later ones
                    # do not.
                    return_freed_memory()
                    has_run = True
                progress.advance(batch.num_tokens)
                if self.check(at_end=not waiting) and journal is not None:
                    journal.save_if_due(self.recorder)

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
