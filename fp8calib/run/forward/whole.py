"""Drive batches through a model that fits into memory whole."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fp8calib.data.plan import Batch, cut_batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry.sites import Role, Site
from fp8calib.machine.allocator import return_freed_memory, return_memory_of
from fp8calib.observe.hooks import HookedCache
from fp8calib.observe.recorder import Recorder, view_batch
from fp8calib.run.forward.decoder import Decoder, OutOfMemoryInForward

GPU_BATCHES_PER_CHECK = 16
"""On a GPU the host looks at the statistics only this often; looking waits for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """From which sequence on batches had to be smaller, and how large they were then."""

    first: int
    batch_size: int


def _ignore(*_: object) -> None:
    return None


class WholeRunner:
    """Runs the text decoder (never the lm_head) and shows every batch to a recorder."""

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], HookedCache]) -> None:
        """Take from `open_calibration_hooks` the function that makes a batch's cache."""
        self._decoder = Decoder(model)
        self._new_cache = new_cache
        self._max_sequences = sys.maxsize
        self._has_run = False

    def run(
        self,
        batches: Iterable[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
        *,
        on_checked: Callable[[], None] = _ignore,
        on_back_off: Callable[[BackOff], None] = _ignore,
    ) -> None:
        """Run all batches; those that do not fit into memory are halved, and so are later ones.

        Args:
            batches: the micro-batches.
            recorder: is shown them.
            advance: is told the tokens of each.
            on_checked: is called where all that the recorder holds is known to be finite.
            on_back_off: is told when batches become smaller.

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
                group = self._check(group, recorder)
            if not self._fits(batch, recorder):
                self._max_sequences = len(batch.lengths) // 2
                on_back_off(BackOff(first=batch.first, batch_size=self._max_sequences))
                waiting.appendleft(batch)
                continue
            group.append(batch)
            advance(batch.num_tokens)
            if self._is_full(group):
                group = self._check(group, recorder)
                on_checked()
        self._check(group, recorder)
        on_checked()

    def _fits(self, batch: Batch, recorder: Recorder) -> bool:
        """Run a batch; false where it can be made smaller and has to be."""
        try:
            self._forward(batch, recorder)
        except OutOfMemoryInForward:
            if len(batch.lengths) == 1:
                raise
        else:
            return True
        return_memory_of(self._decoder.device)
        return False

    def _is_full(self, group: list[Batch]) -> bool:
        return self._decoder.device.type == "cpu" or len(group) >= GPU_BATCHES_PER_CHECK

    def _forward(self, batch: Batch, recorder: Recorder) -> None:
        rows, columns = batch.input_ids.shape
        recorder.begin_batch(view_batch((rows, columns), batch.lengths, batch.first, batch.quarter))
        self._decoder.run(batch, self._new_cache())
        recorder.end_batch()
        if not self._has_run:
            # Statistics are new tensors between the activations; later batches add to them.
            return_freed_memory()
            self._has_run = True

    def _check(self, group: list[Batch], recorder: Recorder) -> list[Batch]:
        """Find what is not finite in a group of batches; give the next group, which is empty."""
        if recorder.check_finite() is None:
            return []
        for single in one_by_one(group):
            recorder.forget()
            self._forward(single, recorder)
            if (site := recorder.check_finite()) is not None:
                raise nonfinite_error(site, single.first, self._decoder.dtype)
        raise CalibrationError("NaN or inf in an activation of a batch, but in no sequence alone")


def nonfinite_error(site: Site, sample: int, dtype: torch.dtype) -> CalibrationError:
    """Make the error that names where NaN or inf was met, computing in `dtype`."""
    what = {Role.INPUT: "the input of"}.get(site.role, f"{site.role} of")
    return CalibrationError(
        f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
        hint="float16 overflows at 65504: try --dtype bfloat16"
        if dtype is torch.float16
        else "look at the weights before it, the embedding included, and at the sample",
    )


def one_by_one(group: Iterable[Batch]) -> Iterable[Batch]:
    """Cut batches into sequences, without their padding."""
    for batch in group:
        yield from cut_into(batch, 1)


def cut_into(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into batches of at most `size` sequences."""
    starts = range(0, len(batch.lengths), size)
    return [cut_batch(batch, start, start + size) for start in starts]
