"""Estimate what each choice costs from gradients, without running it.

The divergence of a small change is half the Fisher information in its direction. With next tokens
drawn from the model itself, the information is the mean square of the derivative of their
log-probability (Amari, Neural Computation 10, 1998). So one walk back through the layers gives the
gradient at the output of each linear, and at K, V and q; each choice then costs a product with the
error that it makes there. Errors of different tokens are taken for independent.

Each layer's weights are read twice, and quantized once for all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8calib.data.sequences import Batch
from fp8calib.geometry.model_geometry import Attention, Layer, Linear
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.hooks import ExpertsCall, HookedCache, open_hooks
from fp8calib.run.forward.decoder import Decoder
from fp8calib.run.forward.lm_head import LmHead, open_lm_head
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_steps import LayerState, LayerSteps
from fp8calib.run.streaming.model import StreamedModel
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.weights import WeightChange
from fp8calib.verification.planning.choices import Group

_STRIDE = 2
"""Choices are priced on every second token, which halves what that costs."""
_ROWS = 256
"""Tokens whose logits are in memory at a time."""

Place = tuple[int, int]
"""The number of a group, and that of its choice."""


class _Tracing:
    """Hooks that keep the tensors of a layer for one micro-batch, and change none."""

    def __init__(self) -> None:
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        """Inputs and outputs of linears, by module."""
        self.heads: dict[Site, torch.Tensor] = {}
        """K, V and q: [B, H, S, D]."""

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.heads[attention.site(Role.K)] = key
        self.heads[attention.site(Role.V)] = value
        return key, value

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        unscaled = query / attention.query_divisor  # as it is quantized
        self.heads[attention.site(Role.Q)] = unscaled
        return unscaled * attention.query_divisor

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        self.inputs[linear.module] = x
        return x

    def on_expert_input(self, call: ExpertsCall, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return hidden

    def on_expert_down(self, call: ExpertsCall, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return rows

    def watch(self, module: nn.Module, name: str) -> Any:
        """Keep the output of a linear."""

        def keep(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            self.outputs[name] = output

        return module.register_forward_hook(keep)


def can_estimate(group: Group) -> bool:
    """Tell whether gradients reach all of a group: those of experts are not traced."""
    changes = (change for each in group.choices for change in each.emulation.weights)
    return not any(p.num_experts for change in changes for p in change.parameters)


def estimate(
    streamed: StreamedModel,
    batches: Sequence[Batch],
    groups: Sequence[Group],
    *,
    seed: int,
    advance: Callable[[int], None],
) -> dict[Place, torch.Tensor]:
    """Give the derivative in the direction of each choice, by token: fp32 [N], as of scores.

    Half the mean square of a choice is its divergence; the mean product of two is what they add to
    each other.
    """
    walk = _Walk(streamed, batches, groups, seed=seed, advance=advance)
    with streamed.open_hidden_states() as store, ExitStack() as stack:
        steps = stack.enter_context(streamed.steps(walk.decoder, batches, store))
        walk.run_forward(steps, store)
        walk.start_back(steps, store)
        walk.run_back(steps, store)
    return walk.join()


class _Walk:
    """A pass through the layers and back."""

    def __init__(
        self,
        streamed: StreamedModel,
        batches: Sequence[Batch],
        groups: Sequence[Group],
        *,
        seed: int,
        advance: Callable[[int], None],
    ) -> None:
        self.decoder = Decoder(streamed.model)
        self._streamed = streamed
        self._batches = batches
        self._groups = groups
        self._advance = advance
        self._generator = torch.Generator().manual_seed(seed)
        self._attentions = streamed.geometry.owners()
        self._found: dict[tuple[Place, int], torch.Tensor] = {}
        self._top = len(streamed.geometry.layers)

    def _state(self, layer: int, place: int) -> int:
        """Give the number of the state that enters a layer."""
        return layer * len(self._batches) + place

    def _gradient(self, place: int) -> int:
        return (self._top + 1) * len(self._batches) + place

    def _cache(self, hooks: _Tracing) -> HookedCache:
        return HookedCache(self.decoder.config, self._attentions, (), hooks)

    def run_forward(self, steps: LayerSteps, store: HiddenStateStore) -> None:
        """Store what enters each layer."""
        with self._streamed.layers() as layers:
            for layer in layers:
                index = layer.layer.index
                with self._streamed.placed(layer):
                    for place, batch in enumerate(self._batches):
                        before = self._load(store, index, place)
                        after = steps.run_layer(index, batch, self._cache(_Tracing()), before)
                        store.put(self._state(index + 1, place), after)
                        self._advance(batch.num_tokens)

    def _load(self, store: HiddenStateStore, layer: int, place: int) -> LayerState | None:
        if not layer:
            return None
        found: LayerState = store.get(self._state(layer, place), self.decoder.device)
        return found

    def start_back(self, steps: LayerSteps, store: HiddenStateStore) -> None:
        """Store the gradient at the output of the last layer."""
        hidden = []
        for place, batch in enumerate(self._batches):
            state = store.get(self._state(self._top, place), self.decoder.device)
            hidden.append(steps.finish(batch, self._cache(_Tracing()), state))
        with self._streamed.load_head_on_demand(), open_lm_head(self._streamed.model) as head:
            pulls = [
                self._pull(each, b, head) for each, b in zip(hidden, self._batches, strict=True)
            ]
        for place, (batch, pull) in enumerate(zip(self._batches, pulls, strict=True)):
            state = store.get(self._state(self._top, place), self.decoder.device)
            leaves, before = _open_leaves(state)
            with torch.enable_grad():
                after = steps.finish(batch, self._cache(_Tracing()), before, traces=True)
            store.put(self._gradient(place), _differentiate([after], leaves, [pull]))

    def _pull(self, hidden: torch.Tensor, batch: Batch, head: LmHead) -> torch.Tensor:
        """Give the gradient of the log-probability of drawn tokens at a hidden state [B, S, C].

        As in the scores, the last token of a sequence predicts nothing, nor one before an image.
        """
        pull = torch.zeros_like(hidden)
        for row, index in enumerate(batch.scored):
            for part in torch.split(index.to(hidden.device), _ROWS):
                states = hidden[row, part].detach().requires_grad_()
                logits = head.logits(states, traces=True)
                drawn = torch.multinomial(
                    logits.detach().float().softmax(-1).cpu(), 1, generator=self._generator
                ).to(logits.device)
                with torch.enable_grad():
                    chosen = logits.float().log_softmax(-1).gather(-1, drawn).sum()
                (pull[row, part],) = torch.autograd.grad(chosen, states)
        return pull

    def run_back(self, steps: LayerSteps, store: HiddenStateStore) -> None:
        """Walk back through the layers, and price the choices of each."""
        with self._streamed.layers(backwards=True) as layers:
            for layer in layers:
                with self._streamed.placed(layer, keep=True):
                    pricing = _Pricing(layer.layer, self._groups, self._streamed.model)
                    for place, batch in enumerate(self._batches):
                        self._step_back(steps, store, pricing, place, batch)
                        self._advance(batch.num_tokens)

    def _step_back(
        self,
        steps: LayerSteps,
        store: HiddenStateStore,
        pricing: _Pricing,
        place: int,
        batch: Batch,
    ) -> None:
        index = pricing.layer.index
        state = self._load(store, index, place)
        leaves, before = ([], None) if state is None else _open_leaves(state)
        seen = _Tracing()
        geometry = self._streamed.geometry
        one_layer = geometry.model_copy(update={"layers": (geometry.layers[index],)})
        with ExitStack() as stack, torch.enable_grad():
            stack.enter_context(
                open_hooks(self._streamed.model, one_layer, seen, query=True, inputs=True)
            )
            for name, module in pricing.linears.items():
                stack.callback(seen.watch(module, name).remove)
            after = steps.run_layer(index, batch, self._cache(seen), before, traces=True)
        wanted = [*leaves, *seen.outputs.values(), *seen.heads.values()]
        gradients = _differentiate(
            pytree.tree_leaves(after.output),
            wanted,
            store.get(self._gradient(place), self.decoder.device),
        )
        own = gradients[len(leaves) :]
        at_outputs = dict(zip(seen.outputs, own, strict=False))
        at_heads = dict(zip(seen.heads, own[len(seen.outputs) :], strict=True))
        for found, flat in pricing.price(seen, at_outputs, at_heads):
            slope = torch.zeros(batch.input_ids.numel())
            slope[::_STRIDE] = flat.cpu() * _STRIDE**0.5  # so that means of squares are of all
            slope = slope.reshape(batch.input_ids.shape)
            rows = [slope[row, index] for row, index in enumerate(batch.scored)]
            key = (found, place)
            joined = torch.cat(rows)
            self._found[key] = self._found.get(key, 0) + joined
        # last: what the last linear gives may have the gradient that is stored, itself
        store.put(self._gradient(place), gradients[: len(leaves)])

    def join(self) -> dict[Place, torch.Tensor]:
        """Join what was found in all micro-batches."""
        places = dict.fromkeys(found for found, _ in self._found)
        count = range(len(self._batches))
        return {each: torch.cat([self._found[each, place] for place in count]) for each in places}


def _open_leaves(state: LayerState) -> tuple[list[torch.Tensor], LayerState]:
    """Make the floating tensors of an output the leaves of a graph."""
    found, spec = pytree.tree_flatten(state.output)
    opened = [leaf.detach().requires_grad_() if _is_float(leaf) else leaf for leaf in found]
    leaves = [leaf for leaf in opened if _is_float(leaf)]
    return leaves, LayerState(pytree.tree_unflatten(opened, spec), state.shared)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _differentiate(
    outputs: Sequence[Any], wanted: Sequence[torch.Tensor], pulls: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Give the gradients at `wanted`: zeros where nothing depends on one."""
    floats = [leaf for leaf in outputs if _is_float(leaf)]
    pairs = [(x, pull) for x, pull in zip(floats, pulls, strict=True) if x.requires_grad]
    given = torch.autograd.grad(
        [x for x, _ in pairs], wanted, [pull for _, pull in pairs], allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, given, strict=True)]


_Product = dict[str, torch.Tensor]
"""Weights as some choices change them, by the module that holds them: fp32 [out, in]."""


class _Pricing:
    """The choices in one layer, with their weights quantized."""

    def __init__(self, layer: Layer, groups: Sequence[Group], model: nn.Module) -> None:
        self.layer = layer
        modules = dict(model.named_modules())
        self.linears = {
            linear.module: modules[linear.module]
            for linear in layer.linears
            if not linear.num_experts
        }
        self._module_of = {
            linear.weight_name: linear.module for linear in layer.linears if not linear.num_experts
        }
        self._values = dict(model.named_parameters())
        self._plain: dict[str, torch.Tensor] = {}
        self._choices: list[tuple[Place, Candidate, list[_Product]]] = []
        made: list[tuple[WeightChange, _Product]] = []
        for g, group in enumerate(groups):
            if layer.index not in group.layers or not can_estimate(group):
                continue
            for c, choice in enumerate(group.choices[1:], start=1):
                products = [self._change(each, made) for each in self._list_own(choice.emulation)]
                self._choices.append(((g, c), choice.emulation, products))

    def _list_own(self, emulation: Candidate) -> list[WeightChange]:
        return [
            change
            for change in emulation.weights
            if all(each.name in self._module_of for each in change.parameters)
        ]

    def _change(self, change: WeightChange, made: list[tuple[WeightChange, _Product]]) -> _Product:
        """Quantize weights, once for all choices that do it alike."""
        for other, product in made:
            if other == change:
                return product
        values = {p.name: self._values[p.name].detach() for p in change.parameters}
        self._plain |= self._take(change, values)
        values = {name: value.clone() for name, value in values.items()}
        for _ in change.apply(values):
            pass
        product = self._take(change, values)
        made.append((change, product))
        return product

    def _take(self, change: WeightChange, values: Mapping[str, torch.Tensor]) -> _Product:
        return {
            self._module_of[p.name]: p.slices(values[p.name])[0].float() for p in change.parameters
        }

    def price(
        self,
        seen: _Tracing,
        at_outputs: Mapping[str, torch.Tensor],
        at_heads: Mapping[Site, torch.Tensor],
    ) -> Iterator[tuple[Place, torch.Tensor]]:
        """Give the derivative of each choice by priced token: fp32 [N]."""
        pulls = {
            module: _take_rows(g).float()
            for module, g in at_outputs.items()
            if module in self._plain
        }
        plain = {
            module: ((pull @ self._plain[module]) * _take_rows(seen.inputs[module]).float()).sum(-1)
            for module, pull in pulls.items()
        }
        pulled: dict[int, _Product] = {}
        rounded: list[tuple[int, Quantizer, torch.Tensor]] = []
        for place, emulation, products in self._choices:
            parts = []
            for product in products:
                if id(product) not in pulled:
                    pulled[id(product)] = {
                        module: pulls[module] @ weight
                        for module, weight in product.items()
                        if module in pulls
                    }
                for module, pull in pulled[id(product)].items():
                    quantizer = emulation.quantizers.get(Site(module, Role.INPUT))
                    x = _round(seen.inputs[module], quantizer, rounded)
                    parts.append((pull * x).sum(-1) - plain[module])
            for site, quantizer in emulation.quantizers.items():
                if site in at_heads:
                    parts.append(_price_heads(seen.heads[site], at_heads[site], quantizer))
            if parts:
                yield place, torch.stack(parts).sum(0)


def _take_rows(x: torch.Tensor) -> torch.Tensor:
    """Take the tokens that are priced: [N, C] of [B, S, C], or of [B * S, C], as experts see it."""
    return x.detach().reshape(-1, x.shape[-1])[::_STRIDE]


def _round(
    x: torch.Tensor,
    quantizer: Quantizer | None,
    rounded: list[tuple[int, Quantizer, torch.Tensor]],
) -> torch.Tensor:
    """Quantize an input, once for all linears that read it alike: fp32 [N, C]."""
    if quantizer is None:
        return _take_rows(x).float()
    for seen, other, found in rounded:
        if seen == id(x) and other.is_same(quantizer):
            return found
    values = quantizer.fake(_take_rows(x)).values
    rounded.append((id(x), quantizer, values))
    return values


def _price_heads(x: torch.Tensor, pull: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Give the derivative in the direction of K, V or q [B, H, S, D] as they are stored."""
    plain, own = (each.detach().transpose(0, 1).flatten(1, 2)[:, ::_STRIDE] for each in (x, pull))
    error = quantizer.for_heads(x.shape[1]).fake(plain.unsqueeze(0)).values[0] - plain.float()
    return (own.float() * error).sum((0, 2))
