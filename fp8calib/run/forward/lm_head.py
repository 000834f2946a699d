"""The way from hidden states to logits, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fp8calib.model.topology.find import find_text_decoder


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is untyped
    """What a text decoder returns: the hidden states, and None for all that is not asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Head:
    """Turns hidden states into logits as the model itself does (scaling, soft caps and all).

    The model's own forward runs with its text decoder replaced by the hidden states, so nothing
    has to be known of the architecture. Made by `open_head`.
    """

    def __init__(self, model: Any, current: list[torch.Tensor]) -> None:
        self._model = model
        self._current = current

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give the logits of hidden states [N, C]: [N, vocabulary], in the model's dtype."""
        self._current[0] = hidden.unsqueeze(0)
        device = self._model.get_input_embeddings().weight.device
        tokens = torch.zeros(
            1, len(hidden), dtype=torch.int64, device="cpu" if device.type == "meta" else device
        )
        logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits[0]


@contextmanager
def open_head(model: PreTrainedModel) -> Iterator[Head]:
    """Put the text decoder of `model` out of the way while the context is open."""
    decoder: Any = find_text_decoder(model)[1]
    before = decoder.__dict__.get("forward")
    current = [torch.zeros(0)]
    decoder.forward = lambda *_args, **_kwargs: _Hidden(last_hidden_state=current[0])
    try:
        yield Head(model, current)
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before
