"""The hooks of calibration: a recorder sees every tensor; none is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from fp8calib.fp8.amax import channel_amax, expert_counts, group_amax, row_amax, segment_amax
from fp8calib.geometry.model_geometry import Attention, Linear, ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.hooks import ExpertsCall, HookedCache, open_hooks, own_attentions
from fp8calib.observe.recorder import ExpertRows, Recorder
from fp8calib.recipe import Observe
from fp8calib.stats.histogram import count_bins


@contextmanager
def open_calibration_hooks(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    recorder: Recorder,
    observe: Observe,
    *,
    ignored: Collection[str],
) -> Iterator[Callable[[], HookedCache]]:
    """Show the tensors of `model` to a recorder while the context is open.

    Args:
        model: the model, unquantized.
        geometry: its geometry.
        recorder: sees the tensors.
        observe: which of K and V, q, and the inputs of linears it sees.
        ignored: paths of modules it does not see.

    Yields:
        Makes the cache for one forward pass; it holds the hook of K and V.
    """
    hooks = CalibrationHooks(recorder)
    config = model.config.get_text_config(decoder=True)
    attentions = own_attentions(geometry)
    unseen = ignored if observe.kv else {each.module for each in attentions.values()}
    with open_hooks(
        model, geometry, hooks, query=observe.query, inputs=observe.inputs, ignored=ignored
    ):
        yield lambda: HookedCache(config, attentions, unseen, hooks)


class CalibrationHooks:
    """Shows the hooked tensors to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record K and V per head."""
        num_heads = attention.num_kv_heads
        self._recorder.observe_heads(attention.site(Role.K), key, num_heads=num_heads)
        self._recorder.observe_heads(attention.site(Role.V), value, num_heads=num_heads)
        return key, value

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Record q per head."""
        self._recorder.observe_heads(attention.site(Role.Q), query, num_heads=query.shape[1])
        return query

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Record the input of a linear per channel."""
        self._recorder.observe_input(Site(linear.module, Role.INPUT), x)
        return x

    def on_expert_input(self, call: ExpertsCall, hidden: torch.Tensor) -> torch.Tensor:
        """Record the input of gate and up per channel and per expert."""
        rows, index = hidden, call.index
        if self._recorder.batch.kept is not None:
            kept = self._recorder.rows("kept", hidden.device)
            rows, index = hidden[kept], index[kept]
        experts = index.flatten()
        per_row = row_amax(rows).unsqueeze(1)
        seen = ExpertRows(
            amax=channel_amax(rows),
            per_expert=segment_amax(
                per_row.repeat_interleave(index.shape[1], 0), experts, call.num_experts
            ),
            positions=self._position_amax(per_row, self._recorder.rows("ranges", rows.device)),
            counts=expert_counts(experts, call.num_experts),
            histogram=self._first_histogram(hidden),
        )
        names = ("gate_proj", "up_proj") if call.module.has_gate else ("up_proj",)
        for name in names:
            self._recorder.observe_experts(Site(f"{call.path}.{name}", Role.INPUT), seen)
        return hidden

    def on_expert_down(self, call: ExpertsCall, rows: torch.Tensor) -> torch.Tensor:
        """Record the input of down per channel and per expert."""
        experts, order = torch.sort(call.index.flatten())
        kept, counted = rows, torch.ones_like(experts)
        if self._recorder.batch.kept is not None:
            # Padding is zeroed, not cut out: a length that hangs on routing would wait for the GPU.
            is_kept = torch.zeros(len(call.index), dtype=torch.int64, device=rows.device)
            is_kept[self._recorder.rows("kept", rows.device)] = 1
            counted = is_kept[order // call.index.shape[1]]
            kept = rows.masked_fill(counted.unsqueeze(1) == 0, 0.0)
        per_block = group_amax(kept, call.block)
        ranges = self._recorder.rows("all_ranges", rows.device)[order // call.index.shape[1]]
        seen = ExpertRows(
            amax=channel_amax(kept),
            per_expert=segment_amax(per_block, experts, call.num_experts),
            positions=self._position_amax(per_block.amax(1, keepdim=True), ranges),
            counts=torch.zeros(
                call.num_experts, dtype=torch.int64, device=rows.device
            ).scatter_add_(0, experts, counted),
            histogram=self._down_histogram(call, kept, order),
        )
        self._recorder.observe_experts(Site(f"{call.path}.down_proj", Role.INPUT), seen)
        return rows

    def _position_amax(self, per_row: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        return segment_amax(per_row, ranges, len(self._recorder.batch.spans)).squeeze(1)

    def _first_histogram(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if not len(self._recorder.batch.input_sample):
            return None
        return count_bins(hidden[self._recorder.rows("input_sample", hidden.device)])

    def _down_histogram(
        self, call: ExpertsCall, rows: torch.Tensor, order: torch.Tensor
    ) -> torch.Tensor | None:
        if not len(self._recorder.batch.input_sample):
            return None
        is_sampled = torch.zeros(len(call.index), dtype=torch.int64, device=rows.device)
        is_sampled[self._recorder.rows("input_sample", rows.device)] = 1
        chosen = is_sampled[order // call.index.shape[1]]
        if rows.device.type == "cpu":
            return count_bins(rows[chosen.bool()])
        # As above: on a GPU the others are zeroed, and their zeros taken out of the count.
        histogram = count_bins(rows.masked_fill(chosen.unsqueeze(1) == 0, 0.0))
        histogram[0] -= (1 - chosen).sum() * rows.shape[1]
        return histogram
