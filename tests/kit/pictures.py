"""What a run could leave behind in a model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

_OWN = {"_modules", "_parameters", "_buffers"}


@dataclass
class Picture:
    """Values, addresses and gradients of tensors; attributes and hooks of modules; interfaces."""

    tensors: dict[str, torch.Tensor]
    parameters: dict[str, tuple[int, bool, torch.Tensor | None]]
    modules: dict[str, str]
    interfaces: tuple[Any, ...]


def take(model: nn.Module) -> Picture:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Picture(
        tensors={name: value.detach().clone() for name, value in state.items()},
        parameters={
            name: (each.data_ptr(), each.requires_grad, each.grad)
            for name, each in model.named_parameters()
        },
        modules={
            name: repr({key: value for key, value in vars(module).items() if key not in _OWN})
            for name, module in model.named_modules()
        },
        interfaces=(
            AttentionInterface.get_interface,
            ExpertsInterface.get_interface,
            dict(ALL_ATTENTION_FUNCTIONS),
            dict(ALL_EXPERTS_FUNCTIONS),
        ),
    )


def assert_unchanged(model: nn.Module, before: Picture) -> None:
    after = take(model)
    assert after.tensors.keys() == before.tensors.keys()
    for name, value in before.tensors.items():
        bits = (x.reshape(-1).view(torch.uint8) for x in (after.tensors[name], value))
        assert torch.equal(*bits), name
    assert after.parameters == before.parameters
    assert after.modules == before.modules
    assert after.interfaces == before.interfaces
