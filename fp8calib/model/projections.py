"""Read the weight of each projection separately, even if it is fused or stacked with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fp8calib.model.shapes import Linear, Part
from fp8calib.model.tensor_parallel import owned_channels, owned_rows
from fp8calib.model.topology.layouts import gate_up_parts
from fp8calib.model.topology.search import is_transposed
from fp8calib.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """The weight of a linear, or of one expert of it."""

    linear: Linear
    expert: int | None
    values: torch.Tensor
    """[out, in], in the checkpoint's dtype; `linear.parts` describe its rows."""

    @property
    def name(self) -> str:
        """The name of the parameter, with the index of the expert."""
        index = "" if self.expert is None else f"[{self.expert}]"
        return f"{self.linear.weight_name}{index}"

    def cut(self, part: Part, tp: int, rank: int) -> torch.Tensor:
        """Give the rows and channels of a part that a tensor-parallel rank owns."""
        channels = owned_channels(self.linear, tp, rank)
        rows = self.values[owned_rows(self.linear, part, tp, rank)]
        return rows[:, channels.start : channels.stop]


def read_linears(linears: Sequence[Linear], source: WeightSource) -> Iterator[LinearWeight]:
    """Read the weights of linears, each parameter once, and stacked experts one by one.

    Raises:
        ModelError: the checkpoint holds no tensor for one of them.
    """
    modules = dict(source.model.named_modules())
    stacks: dict[str, list[Linear]] = defaultdict(list)
    for linear in linears:
        stacks[linear.weight_name].append(linear)
    for linear in linears:
        stacked = stacks.pop(linear.weight_name, [])
        if linear.num_experts and stacked:
            yield from _read_experts(modules[linear.runner], stacked, source)
        elif not linear.num_experts:
            values = source.read(linear.weight_name)
            values = values.T if is_transposed(modules[linear.module]) else values
            yield LinearWeight(linear=linear, expert=None, values=values)


def _read_experts(
    experts: nn.Module, linears: Sequence[Linear], source: WeightSource
) -> Iterator[LinearWeight]:
    parts: dict[str, torch.Tensor] = {}
    """The rows of gate and of up."""
    if (name := linears[0].weight_name).endswith("gate_up_proj"):
        is_interleaved = not getattr(experts, "is_concatenated", True)
        fused = gate_up_parts(2 * linears[0].out_features, interleaved=is_interleaved)
        parts = {part.name: torch.tensor(part.rows(range(part.count))) for part in fused}
    for expert, stored in enumerate(source.read_experts(name)):
        weight = stored.T if getattr(experts, "is_transposed", False) else stored
        for linear in linears:
            part = parts.get(linear.module.rpartition(".")[2])
            rows = None if part is None else part.to(weight.device, non_blocking=True)
            values = weight if rows is None else weight[rows]
            yield LinearWeight(linear=linear, expert=expert, values=values)
