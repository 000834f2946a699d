"""The observation of batches, the same in a whole and in a streamed model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from fp8calib.data.sequences import Batch, cut_batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.batch_view import view_batch
from fp8calib.observe.hooks import HookedCache
from fp8calib.observe.recorder import Recorder
from fp8calib.run.forward.decoder import Decoder

GPU_BATCHES_PER_CHECK = 16
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
        view = view_batch((rows, columns), batch.lengths, batch.first, batch.quarter)
        self.recorder.begin_batch(view)
        yield self._new_cache()
        self.recorder.end_batch()

    def is_check_due(self, group: Sequence[Batch]) -> bool:
        """Whether the batches observed since the last check are to be checked for NaN now."""
        return self.decoder.device.type == "cpu" or len(group) >= GPU_BATCHES_PER_CHECK

    def locate_nonfinite(
        self, group: Iterable[Batch], find_site: Callable[[Batch], Site | None]
    ) -> CalibrationError:
        """Run the sequences of a group one by one, and name the first with NaN or inf.

        `find_site` runs a sequence, and gives the site where it has NaN or inf.
        """
        for sequence in (part for batch in group for part in cut_into(batch, 1)):
            self.recorder.forget()
            if (site := find_site(sequence)) is not None:
                return nonfinite_error(site, sequence.first, self.decoder.dtype)
        return CalibrationError("NaN or inf in an activation of a batch, but in no sequence alone")


def nonfinite_error(site: Site, sample: int, dtype: torch.dtype) -> CalibrationError:
    """Make the error that names the site and the sample with NaN or inf, computed in `dtype`."""
    what = {Role.INPUT: "the input of"}.get(site.role, f"{site.role} of")
    return CalibrationError(
        f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
        hint="float16 overflows at 65504: try --dtype bfloat16"
        if dtype is torch.float16
        else "look at the weights before it, the embedding included, and at the sample",
    )


def cut_into(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into batches of at most `size` sequences, without needless padding."""
    starts = range(0, len(batch.lengths), size)
    return [cut_batch(batch, start, start + size) for start in starts]
