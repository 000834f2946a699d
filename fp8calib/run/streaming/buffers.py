"""The buffers of a streamed model that no checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8calib.errors import ModelError
from fp8calib.model.topology.find import find_text_decoder

NO_STREAMING_HINT = "it cannot be streamed: leave out --memory, or use a larger machine"


def computed_names(model: PreTrainedModel, stored: frozenset[str]) -> frozenset[str]:
    """Name the buffers that the checkpoint does not hold."""
    return frozenset(name for name, _ in model.named_buffers() if name not in stored)


def compute_buffers(model: PreTrainedModel, stored: frozenset[str], device: str) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, scales, masks).

    transformers computes them where it initialises weights, which does nothing to weights without
    memory. It runs twice on different values: a buffer that keeps them is not computed there.

    Raises:
        ModelError: a buffer of the text decoder is not computed by that.
    """
    names = [
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_meta and name not in stored
    ]
    if not names:
        return  # computed when the model was opened before
    first, second = (_initialise(model, names, fill) for fill in (0, 1))
    path = find_text_decoder(model)[0]
    for name in names:
        if name.startswith(f"{path}.") and not torch.equal(first[name], second[name]):
            raise ModelError(
                f"{type(model).__name__}: the buffer {name} is neither stored nor computed",
                hint=NO_STREAMING_HINT,
            )
        _set_buffer(model, name, second[name].to(device))


def _initialise(model: PreTrainedModel, names: Sequence[str], fill: int) -> dict[str, torch.Tensor]:
    for name in names:
        _set_buffer(model, name, torch.full_like(model.get_buffer(name), fill, device="cpu"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    return {name: model.get_buffer(name).clone() for name in names}


def _set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._buffers[leaf] = value
