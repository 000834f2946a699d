"""Compute logits from hidden states, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fp8calib.calibration.decoder import replaced_forward
from fp8calib.model.topology.find import find_text_decoder


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is untyped
    """The output of a text decoder: the hidden states, and None for every other field."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class LmHead:
    """Computes logits by the model's own forward, scaling and soft caps included.

    The text decoder is replaced by one that returns the given hidden states, so no knowledge of the
    architecture is needed. Made by `open_lm_head`.
    """

    def __init__(self, model: Any, current: list[torch.Tensor]) -> None:
        self._model = model
        self._current = current

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of hidden states [N, C]: [N, vocabulary], in the model's dtype."""
        self._current[0] = hidden.unsqueeze(0)
        device = self._model.get_input_embeddings().weight.device
        tokens = torch.zeros(
            1, len(hidden), dtype=torch.int64, device="cpu" if device.type == "meta" else device
        )
        logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits[0]


@contextmanager
def open_lm_head(model: PreTrainedModel) -> Iterator[LmHead]:
    """Replace the forward of the text decoder of `model` while the context is open."""
    decoder: Any = find_text_decoder(model)[1]
    current = [torch.zeros(0)]
    with replaced_forward(decoder, lambda *_args, **_kwargs: _Hidden(last_hidden_state=current[0])):
        yield LmHead(model, current)
