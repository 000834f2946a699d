"""Drive batches through a model that fits into memory whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.data.plan import Batch
from fp8calib.errors import CalibrationError, Fp8CalibError
from fp8calib.geometry import ModelGeometry
from fp8calib.model.topology import text_decoder
from fp8calib.observe.recorder import Recorder, view_batch
from fp8calib.observe.seams import ObservingCache, own_attentions
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
        self._decoder: Any = text_decoder(model)[1]
        self._config = model.config.get_text_config(decoder=True)
        self._attentions = own_attentions(geometry)
        all_modules = {attention.module for attention in self._attentions.values()}
        self._ignored = frozenset(ignored) if observe_kv else frozenset(all_modules)
        self._device = _input_device(model)

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
        return self._device.type == "cpu" or len(group) >= GPU_BATCHES_PER_CHECK

    @torch.no_grad()
    def _forward(self, batch: Batch, recorder: Recorder) -> None:
        rows, columns = batch.input_ids.shape
        recorder.begin_batch(view_batch((rows, columns), batch.lengths, batch.first, batch.quarter))
        try:
            self._run_decoder(batch, recorder)
        except Fp8CalibError:
            raise
        except torch.OutOfMemoryError as error:
            raise CalibrationError(
                f"out of memory at sample {batch.first}, with {rows} sequences of {columns} tokens",
                hint="use a smaller --batch-size or --seq-len, --device-map auto, or --device cpu",
            ) from error
        except Exception as error:
            raise CalibrationError(
                f"{type(self._decoder).__name__}: its forward pass failed at sample {batch.first}: "
                f"{type(error).__name__}: {error}",
                hint="transformers runs this architecture in another way than is known here",
            ) from error
        recorder.end_batch()

    def _run_decoder(self, batch: Batch, recorder: Recorder) -> None:
        mask = batch.mask
        self._decoder(
            input_ids=batch.input_ids.to(self._device, non_blocking=True),
            attention_mask=None
            if mask is None
            else mask.long().to(self._device, non_blocking=True),
            past_key_values=ObservingCache(self._config, self._attentions, self._ignored, recorder),
            use_cache=True,
        )

    def _check(self, group: list[Batch], recorder: Recorder) -> None:
        if recorder.check_finite() is None:
            return
        for single in _one_by_one(group):
            recorder.forget()
            self._forward(single, recorder)
            if (site := recorder.check_finite()) is not None:
                raise self._nonfinite(site, single.first)
        raise CalibrationError("NaN or inf in an activation of a batch, but in no sequence alone")

    def _nonfinite(self, site: Site, sample: int) -> CalibrationError:
        what = {Role.INPUT: "the input of"}.get(site.role, f"{site.role} of")
        is_half = self._decoder.dtype is torch.float16
        return CalibrationError(
            f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
            hint="float16 overflows at 65504: try --dtype bfloat16"
            if is_half
            else "look at the weights before it, the embedding included, and at the sample",
        )


def _one_by_one(group: list[Batch]) -> Iterable[Batch]:
    for batch in group:
        for row, length in enumerate(batch.lengths):
            yield replace(
                batch,
                first=batch.first + row,
                input_ids=batch.input_ids[row : row + 1, :length],
                lengths=(length,),
            )


def _input_device(model: nn.Module) -> torch.device:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device(device) if device is not None else embedding.weight.device
