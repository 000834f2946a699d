"""Experts that have a tensor each in a checkpoint, though transformers looks for their stack.

What engines load is `X.experts.E.gate_proj.weight` and so on. transformers' own tables join these
for the families that are published so; for the others the same operations are named here.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from fp8calib.geometry.expert_layouts import EXPERT_LAYOUTS, Order

_EXPERT = r"\.experts\.\d*."
_STACK_AXES = 3


def list_expert_converters(model: PreTrainedModel) -> Iterator[WeightConverter]:
    """Name how experts with a tensor each become the parameters of a model; none if it has none."""
    experts = next((m for name, m in model.named_modules() if _is_stack(name, m)), None)
    if experts is None:
        return
    turn: list[ConversionOps] = [Transpose(1, 2)] if _is_transposed(model, experts) else []
    yield WeightConverter(
        source_patterns=[f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight"],
        target_patterns=".experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1), *turn],
    )
    yield WeightConverter(
        source_patterns=f"{_EXPERT}down_proj.weight",
        target_patterns=".experts.down_proj",
        operations=[MergeModulelist(dim=0), *turn],
    )


def _is_stack(name: str, module: nn.Module) -> bool:
    """Tell whether a module holds experts with gate above up, and without biases."""
    weight = getattr(module, "gate_up_proj", None)
    return (
        name.rpartition(".")[2] == "experts"
        and isinstance(weight, nn.Parameter)
        and weight.dim() == _STACK_AXES
        and getattr(module, "is_concatenated", True)
        and not getattr(module, "has_bias", False)
    )


def _is_transposed(model: PreTrainedModel, experts: nn.Module) -> bool:
    """Tell whether they lie [in, out]; Llama 4's do not say so themselves."""
    layout = EXPERT_LAYOUTS.get(model.config.get_text_config().model_type)
    is_known = layout is not None and layout.order is Order.IN_OUT
    return bool(getattr(experts, "is_transposed", is_known))
