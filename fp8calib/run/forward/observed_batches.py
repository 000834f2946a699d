"""The observation of batches, the same in a whole and in a streamed model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from fp8calib.data.sequences import Batch, cut_batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry.sites import Role
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.hooks import HookedCache
from fp8calib.observe.recorder import Recorder
from fp8calib.run.forward.decoder import Decoder

_GPU_BATCHES_PER_CHECK = 16
"""How many batches on a GPU share one check for NaN, because each check waits for the device."""


class BatchObserver:
    """Shows the forward passes of batches to a recorder; `open_calibration_hooks` makes caches."""

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
        """Check where enough batches have run since the last check; tell whether it did.

        Raises:
            CalibrationError: as `require_finite`.
        """
        on_cpu = self.decoder.device.type == "cpu"
        is_due = on_cpu or self.recorder.num_unchecked >= _GPU_BATCHES_PER_CHECK
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


def cut_into(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into batches of at most `size` sequences, without needless padding."""
    starts = range(0, len(batch.lengths), size)
    return [cut_batch(batch, start, start + size) for start in starts]
