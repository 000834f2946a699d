"""Compute logits from hidden states, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fp8calib.calibration.decoder import replaced_forward
from fp8calib.errors import VerificationError, first_line
from fp8calib.model.topology import find_text_decoder

_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is untyped
    """The output of a text decoder: the hidden states, and None for every other field."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def open_lm_head(model: PreTrainedModel) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Give the function from hidden states [N, C] to logits [N, V], in the model's dtype.

    It is the model's own forward, or that of the text model in one that takes no text without
    images (BLIP-2), scaling and soft caps included, so no knowledge of the
    architecture is needed: while the context is open, the text decoder is replaced by one that
    returns the given hidden states.
    """
    path, decoder = find_text_decoder(model)
    owner = _find_owner(model, path)
    given = torch.zeros(0)

    @torch.no_grad()
    def logits(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal given
        given = hidden.unsqueeze(0)
        device = model.get_input_embeddings().weight.device
        place = "cpu" if device.type == "meta" else device
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=place)
        try:
            found: torch.Tensor = owner(input_ids=tokens, use_cache=False).logits
        except ValueError as error:  # Kosmos-2 asks for images
            raise VerificationError(
                f"{type(owner).__name__}: its forward does not take text alone: {first_line(error)}"
            ) from error
        return found[0]

    with replaced_forward(decoder, lambda *_args, **_kwargs: _Hidden(last_hidden_state=given)):
        yield logits


def _find_owner(model: PreTrainedModel, decoder: str) -> PreTrainedModel:
    """Find the outermost model around the decoder, by its path, whose forward takes text alone."""
    parts = decoder.split(".")
    for size in range(len(parts)):
        owner = model.get_submodule(".".join(parts[:size]))
        needed = signature(owner.forward).parameters.values()
        is_free = all(
            each.name == "input_ids" or each.default is not each.empty or each.kind in _REST
            for each in needed
        )
        if isinstance(owner, PreTrainedModel) and is_free:
            return owner
    raise VerificationError(f"{type(model).__name__}: its forward takes no text without images")
