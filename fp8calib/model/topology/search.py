"""The state of a search for a model's geometry, and predicates on single modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D


@dataclass(slots=True, kw_only=True)
class GeometrySearch:
    """The known facts about the model, and the weights found so far that cannot be observed."""

    config: Any
    """The config of the text decoder."""
    checkpoint_names: Mapping[str, str]
    family: str = ""
    """The prefix of the names of the model's classes, such as `KimiLinear`."""
    unobserved: dict[str, str] = field(default_factory=dict)
    """Paths of modules whose weights no hook can observe, with the reason."""

    def layer_type(self, index: int) -> str | None:
        """Give the type of a layer by the config; None if it has no list of them."""
        layer_types = getattr(self.config, "layer_types", None)
        return layer_types[index] if layer_types else None

    def class_name(self, module: nn.Module) -> str:
        """Give the name of a module's class without the name of its family."""
        return name_class(module).removeprefix(self.family)


def name_class(module: nn.Module) -> str:
    """Give the name of a module's class; `fully_shard` puts another one before it."""
    classes = type(module).__mro__
    return next(each for each in classes if not issubclass(each, FSDPModule)).__name__


def is_linear(module: nn.Module) -> bool:
    """Tell whether the module is a linear projection: nn.Linear, or GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def linear_features(module: nn.Module) -> tuple[int, int]:
    """Return (in, out) features; a Conv1D's weight is stored [in, out]."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def is_transposed(module: nn.Module) -> bool:
    """Tell whether the module's weight is stored [in, out]."""
    return isinstance(module, Conv1D)


def is_matrix(parameter: nn.Parameter) -> bool:
    """Tell whether at least two of its dimensions hold more than one element."""
    return sum(size > 1 for size in parameter.shape) > 1
