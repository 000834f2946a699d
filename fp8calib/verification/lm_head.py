"""Compute logits from hidden states, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@contextmanager
def open_lm_head(model: PreTrainedModel) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Give the function from hidden states [N, C] to logits [N, V], in the model's dtype.

    It is the model's own forward, scaling and soft caps included, so no knowledge of the
    architecture is needed: while the context is open, the text decoder is replaced by one that
    returns the given hidden states.
    """
    decoder: Any = find_text_decoder(model)[1]
    given = torch.zeros(0)

    @torch.no_grad()
    def logits(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal given
        given = hidden.unsqueeze(0)
        device = model.get_input_embeddings().weight.device
        place = "cpu" if device.type == "meta" else device
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=place)
        found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return found[0]

    with replaced_forward(decoder, lambda *_args, **_kwargs: _Hidden(last_hidden_state=given)):
        yield logits
