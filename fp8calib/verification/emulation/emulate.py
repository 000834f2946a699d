"""Run a model with its tensors and weights quantized as an engine quantizes them.

When the context closes, the hooks are removed and changed weights are read again from the
checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.kernel_trial import gpus_of, is_trusted
from fp8calib.data.sequences import Batch
from fp8calib.model.geometry import KV_ROLES, Attention, Linear, ModelGeometry, Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.numerics.amax import tokens_first
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.candidate import Candidate, blaming
from fp8calib.verification.emulation.fake_quantize import (
    DamageRow,
    FakeQuantized,
    Quantizer,
    add_damage,
    measure_damage,
    measure_heads,
    sum_damage,
)
from fp8calib.verification.emulation.probabilities import (
    AttentionCall,
    attend_in_fp32,
    has_probability_kernel,
    is_reproduced,
)

if TYPE_CHECKING:
    from fp8calib.verification.emulation.weights import ScaleRange

FLUSH_STRIDE = 8
"""Of q and inputs of linears, zeros are counted in every 8th token; of K and V, in all tokens."""
_REMEMBERED_INPUTS = 2
_MOST_ROWS = 4096


class EmulationHooks:
    """Replaces the hooked tensors by quantized ones, and sums up the damage to each."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self._quantizers, self._reads = candidate.quantizers, candidate.reads
        self.roles = frozenset(site.role for site in candidate.quantizers)
        """The roles of the tensors that are seen, beside K and V."""
        self.attends = Role.P in self.roles or bool(candidate.reads)
        """Whether `attend` runs attention in place of the model."""
        self._mask: torch.Tensor | None = None
        """False at padding: bool [B, S]; None: all tokens count, as in the next."""
        self._kept: torch.Tensor | None = None
        """The positions in the batch that are not padding."""
        self._prompt: torch.Tensor | None = None
        """What a type with one scale for a sequence finds it in: bool [B, S]; None: all tokens."""
        self._numbers: dict[torch.device, torch.Tensor] = {}
        """For a padded batch: the numbers that `_find_counted` gives tokens."""
        self._has_own_attention: dict[str, bool] = {}
        self._inputs: list[tuple[torch.Tensor, int, Quantizer, torch.Tensor, DamageRow]] = []
        self._placed: dict[tuple[Hashable, torch.device], Quantizer] = {}
        self._rows: list[tuple[Site, DamageRow]] = []
        self.damage: dict[Site, torch.Tensor] = {}
        """The sums of `measure_damage` over all batches that ended."""
        self.weight_scales: dict[Site, ScaleRange] = {}
        """The scales that the weights were quantized with."""

    def begin_batch(self, batch: Batch) -> None:
        """Open a batch: its padding is not measured."""
        self.begin_call(batch.mask)

    def begin_call(self, mask: torch.Tensor | None) -> None:
        """Open a forward pass; `mask` is False at padding, bool [B, S]."""
        self._kept = None if mask is None else mask.flatten().nonzero().squeeze(1)
        self._mask = self._prompt = mask
        self._numbers.clear()
        self._inputs.clear()
        self._rows.clear()

    def end_batch(self) -> None:
        """Sum up the damage, and let go of the batch's tensors."""
        add_damage(self.damage, self._rows)
        self._rows.clear()
        self._inputs.clear()

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize K and V."""
        return (
            self._heads(attention.site(Role.K), key),
            self._heads(attention.site(Role.V), value),
        )

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Quantize q before the factor that the model multiplies it by, as the engine does."""
        site, divisor = attention.site(Role.Q), attention.query_divisor
        if divisor == 1.0:
            return self._heads(site, query)
        values = self._heads(site, given := query / divisor)
        return query if values is given else values * divisor

    def _heads(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        """Quantize K, V or q [B, H, S, D], if the site is quantized."""
        quantizer = self._quantizers.get(site)
        if quantizer is None:
            return x
        stride = FLUSH_STRIDE if site.role is Role.Q else 1
        values, damage = self._quantize(site, quantizer, x, stride)
        self._rows.append((site, damage))
        return values

    def attend(self, attention: Attention, call: AttentionCall) -> Any:
        """Run attention with its probabilities quantized, where that reproduces the model's."""
        if factors := self._reads.get(attention.module):
            key, value = (
                x * factor.to(x) for x, factor in zip((call.key, call.value), factors, strict=True)
            )
            call = replace(call, key=key, value=value)
        site, module = attention.site(Role.P), attention.module
        if site in self._quantizers and module not in self._has_own_attention:
            self._has_own_attention[module] = not is_reproduced(call, self._kept)
        if site not in self._quantizers or self._has_own_attention[module]:
            return call.run()
        heads, device = call.query.shape[1], call.query.device
        quantizer = self._place(site, self._quantizers[site], heads, device)
        output, damage = attend_in_fp32(call, quantizer, self._kept)
        self._rows += [(site, row) for row in damage]
        if len(self._rows) >= _MOST_ROWS:  # a long sequence has many chunks
            add_damage(self.damage, self._rows)
            self._rows.clear()
        return output, None

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Quantize the input of a linear, once for all that read the same tensor."""
        return self._input([Site(linear.module, Role.INPUT)], x)

    def on_expert_input(
        self,
        linears: Sequence[Linear],
        index: torch.Tensor,  # noqa: ARG002 -- of `TensorHooks`
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Quantize the input of gate and up."""
        return self._input([Site(linear.module, Role.INPUT) for linear in linears], hidden)

    def on_expert_down(
        self, linear: Linear, index: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Quantize the input of down."""
        tokens = None
        if self._kept is not None:
            tokens = torch.sort(index.flatten()).indices // index.shape[1]
        return self._input([Site(linear.module, Role.INPUT)], rows, tokens=tokens)

    def _input(
        self, sites: list[Site], x: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Quantize an input [..., C]; `tokens` are those of its rows, where they are sorted."""
        quantizer = self._quantizers.get(sites[0])
        if quantizer is None or not x.numel():
            return x
        known = (
            (quantized, damage)
            for seen, version, used, quantized, damage in self._inputs
            if seen is x and version == x._version and used.is_same(quantizer)
        )
        if (found := next(known, None)) is None:
            rows = x.reshape(1, 1, -1, x.shape[-1])
            values, damage = self._quantize(sites[0], quantizer, rows, FLUSH_STRIDE, tokens)
            found = values.reshape(x.shape), damage
            self._inputs.append((x, x._version, quantizer, *found))
            del self._inputs[:-_REMEMBERED_INPUTS]
        self._rows += [(site, found[1]) for site in sites]
        return found[0]

    def _quantize(
        self,
        site: Site,
        quantizer: Quantizer,
        x: torch.Tensor,
        flush_stride: int,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, DamageRow]:
        """Quantize [B, H, S, D], and measure what that does to the tokens that count."""
        placed = self._place(site, quantizer, x.shape[1], x.device)
        num_tokens = x.shape[0] * x.shape[2]
        # padding is found where a tensor has as many tokens as the batch
        is_known = self._mask is None or tokens is not None or num_tokens == self._mask.numel()
        has_kernel = x.device.type != "cpu" and has_emulation_kernel(x.device)
        if is_known and has_kernel and placed.fits_kernel:
            counted = self._find_counted(x.device, tokens)
            return _quantize_in_kernel(x, placed, flush_stride, counted)
        before, after = x, (fake := placed.fake(x))
        if self._kept is not None and (tokens is not None or int(self._kept[-1]) < num_tokens):
            kept = self._kept.to(x.device, non_blocking=True)
            kept = kept if tokens is None else torch.isin(tokens, kept)
            clips = None if fake.clips is None else tokens_first(fake.clips)[kept]
            before = tokens_first(x)[kept]
            after = FakeQuantized(tokens_first(fake.values)[kept], clips)
        return fake.values.to(x.dtype), measure_damage(before, after, flush_stride=flush_stride)

    def _find_counted(
        self, device: torch.device, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, int] | None:
        """Count through the tokens of the batch, or given rows of them, without padding.

        Returns:
            Numbers, int32 [B * S] or [rows], -1 at padding, and how many count; None: all do.
        """
        if self._mask is None or self._kept is None:
            return None

        def number(chosen: torch.Tensor) -> torch.Tensor:
            return torch.where(chosen, chosen.cumsum(0, dtype=torch.int32) - 1, -1)

        if device not in self._numbers:  # once for all tensors of the batch
            self._numbers[device] = number(self._mask.flatten()).to(device, non_blocking=True)
        numbers, count = self._numbers[device], len(self._kept)
        if tokens is None:
            return numbers, count
        return number(numbers[tokens] >= 0), count * (len(tokens) // len(numbers))

    def _place(
        self, key: Hashable, quantizer: Quantizer, num_heads: int, device: torch.device
    ) -> Quantizer:
        """Copy static scales to a GPU, once; that of a sequence is found in its prompt.

        Scales of heads are repeated where a model repeats its KV heads before caching them.
        """
        scale = quantizer.scale
        if quantizer.round_trip is not None and scale is Granularity.TENSOR:
            store: Callable[..., torch.Tensor] = quantizer.round_trip
            prompt = None if self._prompt is None else self._prompt.to(device, non_blocking=True)
            return replace(quantizer, round_trip=partial(store, is_prompt=prompt))
        if (key, device) not in self._placed:
            if isinstance(scale, torch.Tensor) and scale.ndim > 1 and len(scale) != num_heads:
                spread = scale.repeat_interleave(num_heads // len(scale), 0)
                quantizer = replace(quantizer, scale=spread)
            self._placed[key, device] = quantizer if device.type == "cpu" else quantizer.to(device)
        return self._placed[key, device]


def _quantize_in_kernel(
    x: torch.Tensor,
    quantizer: Quantizer,
    flush_stride: int,
    counted: tuple[torch.Tensor, int] | None,
) -> tuple[torch.Tensor, DamageRow]:
    from fp8calib.verification.emulation import kernels  # noqa: PLC0415 -- it needs Triton

    return kernels.fake_quantize(x, quantizer, flush_stride=flush_stride, counted=counted)


@cache
def has_emulation_kernel(device: torch.device) -> bool:
    """Whether tensors of a device are quantized by the kernel."""
    if device.type != "cuda":
        return False
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 40, 600, generator=numbers).to(torch.bfloat16)
    quantizers = {
        "a static scale": Quantizer(fmt=E4M3FN, scale=torch.tensor([0.005]), by_reciprocal=True),
        "scales of tokens": Quantizer(fmt=E4M3FN, scale=Granularity.TOKEN),
    }
    return is_trusted(
        device,
        lambda: {
            name: _quantize_in_kernel(x.to(device), each.to(device), 1, None)[0]
            for name, each in quantizers.items()
        },
        lambda: {name: each.fake(x).values.to(x.dtype) for name, each in quantizers.items()},
    )


@contextmanager
def emulated(
    prepared: PreparedModel,
    hooks: EmulationHooks,
    *,
    decoder: Decoder | None = None,
    keeps_originals: bool = False,
) -> Iterator[Callable[[Batch], torch.Tensor]]:
    """Emulate while the context is open; give the function from a batch to its last hidden state.

    `decoder` is that of the model, for callers that emulate again and again.

    The hooks keep their measurements across contexts; errors are about their candidate. When the
    context closes, changed weights are read again, or copied back where `keeps_originals` kept them
    on their device.
    """
    model, geometry, candidate = prepared.model, prepared.geometry, hooks.candidate
    used, attentions = decoder or Decoder(model), geometry.owners()

    def run(batch: Batch) -> torch.Tensor:
        hooks.begin_batch(batch)
        hidden = used.run(batch, HookedCache(used.config, attentions, (), hooks))
        hooks.end_batch()
        return hidden

    weights: AbstractContextManager[None] = nullcontext()
    if candidate.weights:
        # most candidates change none
        from fp8calib.verification.emulation.weights import changed_weights  # noqa: PLC0415

        told = (hooks.damage, hooks.weight_scales)
        weights = changed_weights(
            *(model, candidate.weights, prepared.weights, *told), keeps=keeps_originals
        )
    with blaming(candidate.name), weights, open_emulation_hooks(model, geometry, hooks):
        yield run


def open_emulation_hooks(
    model: PreTrainedModel, geometry: ModelGeometry, hooks: EmulationHooks
) -> AbstractContextManager[None]:
    """Open the hooks of attention and of inputs of linears, where `hooks` need their tensors."""
    for device in gpus_of(model):  # before the batches, as the host waits for it
        if hooks.roles - {Role.P}:
            has_emulation_kernel(device)
        if Role.P in hooks.roles:
            has_probability_kernel(device)

    def attend(attention: Attention, *call: Any) -> Any:
        return hooks.attend(attention, AttentionCall(*call))

    return open_hooks(
        model,
        geometry,
        hooks,
        query=hooks.attends or Role.Q in hooks.roles,
        inputs=Role.INPUT in hooks.roles,
        attend=attend if hooks.attends else None,
    )


# --- several scales on the same tensors -----------------------------------------------------------

SEQUENCE_STRIDE = 4
"""Every 4th sequence is measured."""


class MeasurementHooks(EmulationHooks):
    """Measures the scales of candidates on the same K, V and q, which stay unquantized.

    A scale that the engine uses is measured beside the fitted one: itself times the smallest power
    of two with which nothing clips. The two round alike every value that neither clips nor
    underflows, so what differs is what the scale loses.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        super().__init__(Candidate())
        self._measured: dict[Site, dict[str, Quantizer]] = defaultdict(dict)
        """By site and candidate."""
        for candidate in candidates:
            for site, quantizer in candidate.quantizers.items():
                is_static = isinstance(quantizer.scale, torch.Tensor) and not quantizer.round_trip
                if is_static and site.role in {*KV_ROLES, Role.Q}:
                    self._measured[site][candidate.name] = quantizer
        self.roles = frozenset(site.role for site in self._measured)
        self._is_measured = False
        self.found: dict[tuple[str, Site], torch.Tensor] = {}
        """The sums of `measure_heads` by candidate and site: fp64 [2, H, 6]. They are those with
        its scales and, behind them, with the fitted ones."""

    def begin_batch(self, batch: Batch) -> None:
        """Open a batch, which is measured if it holds one of the chosen sequences."""
        super().begin_batch(batch)
        sequences = range(batch.first, batch.first + len(batch.lengths))
        self._is_measured = any(index % SEQUENCE_STRIDE == 0 for index in sequences)

    def _heads(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        """Measure K, V or q [B, H, S, D]."""
        measured = self._measured.get(site, {}) if self._is_measured else {}
        if not measured:
            return x
        heads = x.transpose(0, 1).flatten(1, 2)  # by head: the tokens that count
        if self._kept is not None:
            heads = heads[:, self._kept.to(x.device, non_blocking=True)]
        for name, quantizer in measured.items():
            key = (name, site)
            mine = self._place(key, quantizer, len(heads), heads.device)
            pair = [measure_heads(heads, mine.fake(heads))] * 2
            if quantizer.is_scaled:
                fitted = mine.fitted_to(heads)
                # comparing scales on a GPU would wait for it
                if heads.device.type != "cpu" or not fitted.is_same(mine):
                    pair[1] = measure_heads(heads, fitted.fake(heads))
            before = [self.found[key]] if key in self.found else []
            self.found[key] = sum_damage([*before, torch.stack(pair)])
        return x
