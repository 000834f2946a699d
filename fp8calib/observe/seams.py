"""Where a running model is observed: its cache, its linears, its attention, its experts.

Every seam is opened by a context manager and closed by it, whatever happens inside; no module
keeps anything. K and V are taken where a server stores them (`Cache.update`), q where attention
receives it, the inputs of linears by forward pre-hooks, those of experts in transformers' experts
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.modeling_utils import AttentionInterface

from fp8calib.errors import CalibrationError
from fp8calib.geometry import Attention, ModelGeometry
from fp8calib.histogram import count_bins
from fp8calib.observe.recorder import ExpertRows, Recorder
from fp8calib.observe.reductions import (
    block_amax,
    channel_amax,
    expert_amax,
    expert_counts,
    row_amax,
)
from fp8calib.sites import Role, Site


class ObservingCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A cache that records what a server would store and keeps none of it.

    States of linear-attention layers are kept, as the model reads them back.
    """

    def __init__(
        self,
        config: Any,
        attentions: Mapping[int, Attention],
        ignored: Collection[str],
        recorder: Recorder,
    ) -> None:
        super().__init__(config=config)
        self._attentions = attentions
        self._ignored = ignored
        self._recorder = recorder

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002 -- the base class passes layer options on
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record K and V ([B, H, S, D] each) and hand them back."""
        attention = self._attentions.get(layer_idx)
        if attention is None or not _fits(attention, key_states, value_states):
            raise _unexpected(attention, layer_idx, key_states, value_states)
        if attention.module not in self._ignored:
            num_heads = attention.num_kv_heads
            self._recorder.observe_heads(attention.site(Role.K), key_states, num_heads=num_heads)
            self._recorder.observe_heads(attention.site(Role.V), value_states, num_heads=num_heads)
        return key_states, value_states


def _fits(attention: Attention, key: torch.Tensor, value: torch.Tensor) -> bool:
    has_heads = all(x.shape[1] % attention.num_kv_heads == 0 for x in (key, value))
    sizes = key.shape[-1], value.shape[-1]
    return has_heads and sizes == (attention.k_head_dim, attention.v_head_dim)


def _unexpected(
    attention: Attention | None, layer_idx: int, key: torch.Tensor, value: torch.Tensor
) -> CalibrationError:
    expected = "no K/V"
    if attention is not None:
        sizes = f"{attention.k_head_dim} (K) and {attention.v_head_dim} (V)"
        expected = f"{attention.num_kv_heads} of sizes {sizes}"
    return CalibrationError(
        f"layer {layer_idx} caches {key.shape[1]} KV heads of sizes {key.shape[-1]} (K) and "
        f"{value.shape[-1]} (V) where the topology found {expected}"
    )


def own_attentions(geometry: ModelGeometry) -> dict[int, Attention]:
    """Map layer index to attention, for the layers that store K and V of their own."""
    return {
        layer.index: attention
        for layer, attention in geometry.attentions()
        if attention.producer is None
    }


@contextmanager
def observed(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    recorder: Recorder,
    *,
    query: bool,
    inputs: bool,
    ignored: Collection[str],
) -> Iterator[None]:
    """Observe everything but K and V (which `ObservingCache` sees) while the context is open.

    Args:
        model: the model, unquantized.
        geometry: its geometry.
        recorder: takes the statistics.
        query: observe q.
        inputs: observe the inputs of linears and experts.
        ignored: paths of modules not to observe.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        if query:
            stack.enter_context(_observe_queries(modules, geometry, recorder, ignored))
        if inputs:
            stack.enter_context(_observe_linears(modules, geometry, recorder, ignored))
            stack.enter_context(_observe_experts(modules, geometry, recorder, ignored))
        yield


# --- linears -----------------------------------------------------------------------------------


@contextmanager
def _observe_linears(
    modules: Mapping[str, nn.Module],
    geometry: ModelGeometry,
    recorder: Recorder,
    ignored: Collection[str],
) -> Iterator[None]:
    with ExitStack() as stack:
        for _, linear in geometry.linears():
            if not linear.num_experts and linear.module not in ignored:
                hook = _input_hook(Site(linear.module, Role.INPUT), recorder)
                handle = modules[linear.module].register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _input_hook(site: Site, recorder: Recorder) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.observe_input(site, args[0] if args else kwargs["input"])

    return hook


# --- queries -----------------------------------------------------------------------------------


@contextmanager
def _observe_queries(
    modules: Mapping[str, nn.Module],
    geometry: ModelGeometry,
    recorder: Recorder,
    ignored: Collection[str],
) -> Iterator[None]:
    sites = {
        modules[attention.module]: attention.site(Role.Q)
        for _, attention in geometry.attentions()
        if attention.module not in ignored
    }

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if (site := sites.get(module)) is not None:
                recorder.observe_heads(site, query, num_heads=query.shape[1])
            return function(module, query, *args, **kwargs)

        return attend

    # The lookup is wrapped, not a function of its own registered: masks go by the registered name.
    with _wrapped_lookup(AttentionInterface, wrap):
        yield


@contextmanager
def _wrapped_lookup(
    interface: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    original = interface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(original(self, name, default))

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


# --- experts -----------------------------------------------------------------------------------


@contextmanager
def _observe_experts(
    modules: Mapping[str, nn.Module],
    geometry: ModelGeometry,
    recorder: Recorder,
    ignored: Collection[str],
) -> Iterator[None]:
    blocks: dict[nn.Module, tuple[str, int]] = {}
    for _, linear in geometry.linears():
        path = linear.module.rpartition(".")[0]
        if linear.num_experts and path not in ignored:
            blocks[modules[path]] = (path, linear.expert_block)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if module not in blocks:
                return function(module, hidden, index, *args, **kwargs)
            path, block = blocks[module]
            routed = _Routed(module, index, recorder)
            routed.observe_first(path, hidden)
            with routed.observe_down(path, block):
                return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, index, *args, **kwargs)

        return run

    with _wrapped_lookup(ExpertsInterface, wrap):
        yield


class _Routed:
    """The tokens of one experts module in one forward pass; index [N, K] names their experts."""

    def __init__(self, module: Any, index: torch.Tensor, recorder: Recorder) -> None:
        self._module = module
        self._recorder = recorder
        self._num_experts = int(module.down_proj.shape[0])
        self._index = index

    def observe_first(self, path: str, hidden: torch.Tensor) -> None:
        """Observe the input of gate and up: [N, C]."""
        rows, index = hidden, self._index
        if self._recorder.batch.kept is not None:
            kept = self._recorder.rows("kept", hidden.device)
            rows, index = hidden[kept], index[kept]
        experts = index.flatten()
        per_row = row_amax(rows).repeat_interleave(index.shape[1]).unsqueeze(1)
        seen = ExpertRows(
            amax=channel_amax(rows),
            per_expert=expert_amax(per_row, experts, self._num_experts),
            counts=expert_counts(experts, self._num_experts),
            histogram=self._first_histogram(hidden),
        )
        names = ("gate_proj", "up_proj") if self._module.has_gate else ("up_proj",)
        for name in names:
            self._recorder.observe_experts(Site(f"{path}.{name}", Role.INPUT), seen)

    @contextmanager
    def observe_down(self, path: str, block: int) -> Iterator[None]:
        """Observe the input of down, which `grouped_mm` computes with rows sorted by expert."""
        site = Site(f"{path}.down_proj", Role.INPUT)
        if not self._module.has_gate:
            hook = self._module.act_fn.register_forward_hook(
                lambda _module, _args, output: self._observe_sorted(site, output, block)
            )
            try:
                yield
            finally:
                hook.remove()
            return
        apply_gate = self._module._apply_gate

        def observing(gate_up: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = apply_gate(gate_up)
            self._observe_sorted(site, output, block)
            return output

        self._module._apply_gate = observing
        try:
            yield
        finally:
            del self._module._apply_gate

    def _observe_sorted(self, site: Site, rows: torch.Tensor, block: int) -> None:
        experts, order = torch.sort(self._index.flatten())
        counted = torch.ones_like(experts)
        if self._recorder.batch.kept is not None:
            # Padding is zeroed, not cut out: a length that hangs on routing would wait for the GPU.
            is_kept = torch.zeros(len(self._index), dtype=torch.int64, device=rows.device)
            is_kept[self._recorder.rows("kept", rows.device)] = 1
            counted = is_kept[order // self._index.shape[1]]
            rows = rows.masked_fill(counted.unsqueeze(1) == 0, 0.0)
        seen = ExpertRows(
            amax=channel_amax(rows),
            per_expert=expert_amax(block_amax(rows, block), experts, self._num_experts),
            counts=torch.zeros(
                self._num_experts, dtype=torch.int64, device=rows.device
            ).scatter_add_(0, experts, counted),
            histogram=self._down_histogram(rows, order),
        )
        self._recorder.observe_experts(site, seen)

    def _first_histogram(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if not len(self._recorder.batch.input_sample):
            return None
        return count_bins(hidden[self._recorder.rows("input_sample", hidden.device)])

    def _down_histogram(self, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor | None:
        if not len(self._recorder.batch.input_sample):
            return None
        is_sampled = torch.zeros(len(self._index), dtype=torch.int64, device=rows.device)
        is_sampled[self._recorder.rows("input_sample", rows.device)] = 1
        chosen = is_sampled[order // self._index.shape[1]]
        if rows.device.type == "cpu":
            return count_bins(rows[chosen.bool()])
        # As above: on a GPU the others are zeroed, and their zeros taken out of the count.
        histogram = count_bins(rows.masked_fill(chosen.unsqueeze(1) == 0, 0.0))
        histogram[0] -= (1 - chosen).sum() * rows.shape[1]
        return histogram
