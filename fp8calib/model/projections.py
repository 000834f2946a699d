"""Read the weight of each projection separately, even if it is fused or stacked with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fp8calib.geometry.model_geometry import Linear, ModelGeometry
from fp8calib.model.topology.search import is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.model.weight_stats import expert_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """The weight of a linear, or of one expert of it."""

    linear: Linear
    expert: int | None
    values: torch.Tensor
    """[out, in], in the checkpoint's dtype; its rows are those that `linear.parts` describe."""


def read_linears(
    model: PreTrainedModel, geometry: ModelGeometry, source: WeightSource
) -> Iterator[LinearWeight]:
    """Read the weights of all attention and MLP projections, each parameter once.

    Raises:
        ModelError: the checkpoint holds no tensor for one of them.
    """
    modules = dict(model.named_modules())
    stacked: dict[str, list[Linear]] = defaultdict(list)
    for _, linear in geometry.linears():
        if linear.section == "other":
            continue
        if linear.num_experts:
            stacked[linear.weight_name].append(linear)
            continue
        values = source.read(linear.weight_name)
        if is_transposed(modules[linear.module]):
            values = values.T
        yield LinearWeight(linear=linear, expert=None, values=values)
    for name, linears in stacked.items():
        experts = modules[linears[0].module.rpartition(".")[0]]
        parts = {part.name: part for part in expert_parts(experts, linears[0])}
        for expert, stored in enumerate(source.read_experts(name)):
            weight = stored.T if getattr(experts, "is_transposed", False) else stored
            for linear in linears:
                part = parts[linear.module.rpartition(".")[2]]
                rows = weight[part.rows(range(part.count))] if len(parts) > 1 else weight
                yield LinearWeight(linear=linear, expert=expert, values=rows)
