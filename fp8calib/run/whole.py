"""Drive batches through a model that fits into memory whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from fp8calib.data.plan import Batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry import ModelGeometry
from fp8calib.observe.observing import ObservingTaps
from fp8calib.observe.recorder import Recorder, view_batch
from fp8calib.observe.seams import TappedCache, own_attentions
from fp8calib.run.decoder import Decoder
from fp8calib.sites import Role, Site

GPU_BATCHES_PER_CHECK = 16
"""On a GPU the host looks at the statistics only this often; looking waits for the device."""


class WholeRunner:
    """Runs the text decoder (never the lm_head) and shows every batch to a recorder."""

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: ModelGeometry,
        *,
        observe_kv: bool,
        ignored: Collection[str],
    ) -> None:
        self._decoder = Decoder(model)
        self._attentions = own_attentions(geometry)
        all_modules = {attention.module for attention in self._attentions.values()}
        self._ignored = frozenset(ignored) if observe_kv else frozenset(all_modules)

    def run(
        self, batches: Iterable[Batch], recorder: Recorder, advance: Callable[[int], None]
    ) -> None:
        """Run all batches; `advance` is told the tokens of each.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names layer and sample.
        """
        group: list[Batch] = []
        for batch in batches:
            if group and (self._is_full(group) or group[-1].quarter != batch.quarter):
                self._check(group, recorder)
                group = []
            self._forward(batch, recorder)
            group.append(batch)
            advance(batch.num_tokens)
        self._check(group, recorder)

    def _is_full(self, group: list[Batch]) -> bool:
        return self._decoder.device.type == "cpu" or len(group) >= GPU_BATCHES_PER_CHECK

    def _forward(self, batch: Batch, recorder: Recorder) -> None:
        rows, columns = batch.input_ids.shape
        recorder.begin_batch(view_batch((rows, columns), batch.lengths, batch.first, batch.quarter))
        cache = TappedCache(
            self._decoder.config, self._attentions, self._ignored, ObservingTaps(recorder)
        )
        self._decoder.run(batch, cache)
        recorder.end_batch()

    def _check(self, group: list[Batch], recorder: Recorder) -> None:
        if recorder.check_finite() is None:
            return
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
        for row, length in enumerate(batch.lengths):
            yield replace(
                batch,
                first=batch.first + row,
                input_ids=batch.input_ids[row : row + 1, :length],
                lengths=(length,),
            )
