"""The true inputs and caches of a model, captured without any code of the product.

A plain forward of the whole model, one sequence at a time, with every tensor kept: the arguments of
the cache layers' own `update`, the input of every linear, the query given to the attention kernels,
and the experts run one by one in a Python loop.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import cache_utils
from transformers.pytorch_utils import Conv1D


@dataclass
class Capture:
    """Tensors by the place they were observed, one entry per forward pass."""

    kv: dict[int, list[tuple[np.ndarray, np.ndarray]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    inputs: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    queries: list[list[np.ndarray]] = field(default_factory=list)
    routed: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def run(model: nn.Module, sequences: list[torch.Tensor]) -> Capture:
    """Run every sequence through the whole model and keep all tensors."""
    capture = Capture()
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_keep_kv(capture))
        stack.enter_context(_keep_inputs(model, capture))
        stack.enter_context(_keep_queries(model, capture))
        for sequence in sequences:
            capture.queries.append([])
            model(sequence.unsqueeze(0), use_cache=True)
    return capture


@contextmanager
def _keep_kv(capture: Capture) -> Iterator[None]:
    original = cache_utils.Cache.update

    def update(self: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        capture.kv[layer_idx].append((key.numpy().copy(), value.numpy().copy()))
        return original(self, key, value, layer_idx, *args, **kwargs)

    with patch.object(cache_utils.Cache, "update", update):
        yield


@contextmanager
def _keep_inputs(model: nn.Module, capture: Capture) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _module, args, name=name: capture.inputs[name].append(
                        args[0].numpy().reshape(-1, args[0].shape[-1]).copy()
                    )
                )
            )
        elif hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Parameter):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _module, args, name=name: capture.routed[name].append(
                        tuple(x.clone() for x in args[:2])
                    )
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _keep_queries(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Capture q as torch's kernel or the family's eager function receives it, layer by layer."""
    kernel = functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        capture.queries[-1].append(query.numpy().copy())
        return kernel(query, *args, **kwargs)

    family = sys.modules[type(model).__module__]
    eager = getattr(family, "eager_attention_forward", None)

    def attend_eagerly(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        capture.queries[-1].append(query.numpy().copy())
        return eager(module, query, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attend))
        if eager is not None:
            stack.enter_context(patch.object(family, "eager_attention_forward", attend_eagerly))
        yield


def head_amax(tensors: list[np.ndarray], num_heads: int) -> np.ndarray:
    """Largest magnitude per head of [1, H, S, D] tensors; copies of a head count as that head."""
    stacked = np.concatenate([np.abs(x[0]).max(axis=(1, 2))[None] for x in tensors])
    return stacked.max(0).reshape(num_heads, -1).max(1)


def channel_amax(rows: list[np.ndarray]) -> np.ndarray:
    """Largest magnitude per channel of [N, C] tensors."""
    return np.abs(np.concatenate(rows)).max(0)


@dataclass
class ExpertTruth:
    """The inputs of one layer's experts: of gate/up and of down, expert by expert."""

    first: dict[int, np.ndarray]
    down: dict[int, np.ndarray]


def run_experts(experts: Any, routed: list[tuple[torch.Tensor, torch.Tensor]]) -> ExpertTruth:
    """Run every expert alone on the tokens that were routed to it."""
    first: dict[int, list[torch.Tensor]] = defaultdict(list)
    down: dict[int, list[torch.Tensor]] = defaultdict(list)
    with torch.no_grad():
        for hidden, index in routed:
            flat = hidden.reshape(-1, hidden.shape[-1])
            for expert in range(experts.down_proj.shape[0]):
                tokens = (index == expert).any(-1).nonzero().flatten()
                if not len(tokens):
                    continue
                first[expert].append(flat[tokens])
                down[expert].append(_down_input(experts, expert, flat[tokens]))
    return ExpertTruth(
        first={expert: torch.cat(rows).numpy() for expert, rows in first.items()},
        down={expert: torch.cat(rows).numpy() for expert, rows in down.items()},
    )


def _down_input(experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = experts.gate_up_proj[expert]
    if type(experts).__name__ == "GptOssExperts":
        both = x @ weight + experts.gate_up_proj_bias[expert]
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    return experts.act_fn(gate) * up
