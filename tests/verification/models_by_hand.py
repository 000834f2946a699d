"""Copies of models whose weights were replaced by hand, with inputs quantized on their way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.verification.by_hand import Change

ROUTERS = ("gate", "router", "shared_expert_gate", "modality_router", "in_proj_ba")
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass
class Recipe:
    """What a scheme does, by hand: weights [out, in] and inputs."""

    weight: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
    """Given the weight and all of its fused group."""
    inputs: Callable[[str], Change] = field(default=lambda _name: _leave)
    """Given a module's path."""


def _leave(x: torch.Tensor) -> torch.Tensor:
    return x


def quantize_by_hand(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    copy = deepcopy(model)
    originals = dict(model.named_modules())
    for name, module in copy.named_modules():
        if name.rpartition(".")[2] in (*ROUTERS, "lm_head") or "unembed" in name:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            group = [_out_in(member) for member in _fused_with(name, originals)]
            replaced = recipe.weight(_out_in(originals[name]), group)
            module.weight.data = replaced.T.contiguous() if _is_conv(module) else replaced
            if not _is_in_a_layer(name):
                continue  # no hook sees its inputs
            change = recipe.inputs(name)
            module.register_forward_pre_hook(
                lambda _module, args, change=change: (change(args[0]), *args[1:])
            )
        elif is_experts(module):
            _replace_experts(name, module, recipe)
    return copy


def _is_in_a_layer(name: str) -> bool:
    return re.search(r"\.(layers|h)\.\d+\.", name) is not None


def _is_conv(module: nn.Module) -> bool:
    return isinstance(module, Conv1D)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of all experts of a layer."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter)


def _out_in(module: Any) -> torch.Tensor:
    return module.weight.detach().T if _is_conv(module) else module.weight.detach()


def _fused_with(name: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    parent, _, last = name.rpartition(".")
    names = next((group for group in FUSED if last in group), (last,))
    return [modules[f"{parent}.{n}"] for n in names if f"{parent}.{n}" in modules]


def _replace_experts(name: str, experts: Any, recipe: Recipe) -> None:
    """Run every expert alone, in a loop, on quantized rows and weights."""
    is_gpt_oss = type(experts).__name__ == "GptOssExperts"
    first = [
        quantize_expert(weight, recipe, flip=True)
        if is_gpt_oss
        else quantize_gate_up(weight, recipe)
        for weight in experts.gate_up_proj.detach()
    ]
    down = [
        quantize_expert(weight, recipe, flip=is_gpt_oss) for weight in experts.down_proj.detach()
    ]
    change_first, change_down = (recipe.inputs(f"{name}.{n}") for n in ("gate_proj", "down_proj"))

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        quantized = change_first(hidden)
        for expert in range(len(first)):
            tokens, slots = (index == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            both = linear(quantized[tokens], first[expert])
            if is_gpt_oss:
                both = both + experts.gate_up_proj_bias[expert]
                gate, up = both[:, 0::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
                rows = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
            else:
                gate, up = both.chunk(2, -1)
                rows = experts.act_fn(gate) * up
            out = linear(change_down(rows), down[expert])
            out = out + experts.down_proj_bias[expert] if is_gpt_oss else out
            result.index_add_(0, tokens, out * weights[tokens, slots, None])
        return result

    experts.forward = forward


def quantize_expert(weight: torch.Tensor, recipe: Recipe, *, flip: bool) -> torch.Tensor:
    """Quantize the weight of one expert, which is [in, out] where `flip` says so."""
    weight = weight.T if flip else weight
    return recipe.weight(weight, [weight])


def quantize_gate_up(weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Quantize gate and up of one expert, which a checkpoint stores as two weights."""
    parts = list(weight.chunk(2))
    return torch.cat([recipe.weight(part, parts) for part in parts])
