"""Score candidates and the reference per token; logits are reduced at once, never kept.

Shapes: N tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fp8calib.calibration.decoder import replaced_forward
from fp8calib.data.sequences import Batch
from fp8calib.errors import VerificationError, first_line
from fp8calib.model.topology import find_text_decoder

_BYTES_AT_ONCE = {2: 3 * 2**22, 4: 9 * 2**22, 8: 18 * 2**22}
"""Size of a block of logits on a CPU, by the bytes of an element. A product of fewer rows takes up
to twice the time per row; in fp32 a larger block is needed to avoid that."""
_BYTES_AT_ONCE_GPU = 2**29
_CANDIDATES_AT_ONCE = 2
"""Candidates whose logits are in memory beside the reference's; usually there are two."""
_PRODUCT_BLOCKS = 3
"""Blocks of logits that the product itself was measured to take on a CPU."""
_REDUCED_AT_ONCE, _REDUCED_AT_ONCE_GPU = 2**19, 2**26
"""On a CPU so few elements that they stay in its cache from one reduction to the next; on a GPU so
few that their fp32 takes less than the logits."""
_BLOCK = 256
"""Columns in which the place of a largest element is looked for."""
_REDUCTIONS = 6
"""Tensors of so many elements that one reduction holds."""
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [N, C] -> logits [N, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of one candidate: one number per scored token, sequences in order."""

    logprobs: torch.Tensor
    """log p(token | earlier tokens), in nats: fp32 [N]."""
    klds: torch.Tensor
    """KL(reference || candidate) over the vocabulary, in nats: fp32 [N]; zeros for the reference.
    """
    agrees: torch.Tensor
    """Whether the token with the largest logit, the first of several, is the reference's: bool [N].
    """
    ties: torch.Tensor
    """Whether it is not, but the reference's token has an equal logit: bool [N]."""
    watched: torch.Tensor
    """Log-probabilities of the W tokens that were asked for, and in the last column that of the
    most likely token: fp32 [N, W + 1]; of candidates, and where none were asked for, [N, 0]."""


def score_batch(
    batch: Batch,
    reference: torch.Tensor,
    candidates: Sequence[torch.Tensor],
    logits: Logits,
    vocab_size: int,
    watched: torch.Tensor | None = None,
) -> list[TokenScores]:
    """Score a batch: the reference first, then each candidate.

    Hidden states are [B, S, C]; `logits` computes logits from them. `watched` [N, W] are tokens
    whose log-probabilities by the reference are kept.
    """
    width = batch.input_ids.shape[1]
    # The rows, batch-major, that predict a token, and the tokens that they should predict.
    index = torch.cat([row * width + scored for row, scored in enumerate(batch.scored)])
    targets = batch.input_ids.flatten()[index + 1]
    if watched is None:
        watched = torch.zeros(len(index), 0, dtype=torch.int64)
    block, _ = _count_rows(reference.device, vocab_size, reference.element_size())
    parts = [
        _score_block(
            [
                hidden.flatten(0, 1)[rows.to(hidden.device, non_blocking=True)]
                for hidden in (reference, *candidates)
            ],
            expected,
            asked,
            logits,
        )
        for rows, expected, asked in zip(
            *(torch.split(each, block) for each in (index, targets, watched)), strict=True
        )
    ]
    return join_scores(parts)


def join_scores(
    parts: Sequence[Sequence[TokenScores]], device: torch.device | None = None
) -> list[TokenScores]:
    """Join the scores of parts of the text, model by model; with `device` they are copied to it."""
    names = [field.name for field in fields(TokenScores)]
    return [
        TokenScores(**{n: torch.cat([getattr(each, n) for each in own]).to(device) for n in names})
        for own in zip(*parts, strict=True)
    ]


def _count_rows(device: torch.device, vocab_size: int, itemsize: int) -> tuple[int, int]:
    """Count the rows of logits of a block, and those that are reduced at a time."""
    size, reduced = _BYTES_AT_ONCE[itemsize], _REDUCED_AT_ONCE
    if device.type != "cpu":
        size, reduced = _BYTES_AT_ONCE_GPU, _REDUCED_AT_ONCE_GPU
    return max(size // (vocab_size * itemsize), 16), max(reduced // vocab_size, 4)


def scoring_bytes(device: torch.device, vocab_size: int, itemsize: int, *, num_tokens: int) -> int:
    """Compute the most memory that logits take: blocks, a product's workspace, reductions.

    `itemsize` is that of a logit; `num_tokens` are those of the largest batch.
    """
    rows, at_once = _count_rows(device, vocab_size, itemsize)
    rows = min(rows, num_tokens)
    block = rows * vocab_size * itemsize
    reduced = _REDUCED_AT_ONCE if device.type == "cpu" else min(at_once, rows) * vocab_size
    return (1 + _CANDIDATES_AT_ONCE + _PRODUCT_BLOCKS) * block + _REDUCTIONS * reduced * 4


def _score_block(
    hidden: Sequence[torch.Tensor], targets: torch.Tensor, watched: torch.Tensor, logits: Logits
) -> list[TokenScores]:
    """Compute the logits of a block, and reduce them a few rows at a time.

    However many candidates there are, the logits of only a few are in memory together.
    """
    first, others = logits(hidden[0]), hidden[1:]
    _, rows = _count_rows(first.device, first.shape[1], first.element_size())
    wanted = torch.split(targets.to(first.device, non_blocking=True).unsqueeze(1), rows)
    asked = torch.split(watched.to(first.device, non_blocking=True), rows)
    scores: list[TokenScores] = []
    for start in range(0, max(len(others), 1), _CANDIDATES_AT_ONCE):
        found = [first, *map(logits, others[start : start + _CANDIDATES_AT_ONCE])]
        pieces = zip(*(torch.split(each, rows) for each in found), strict=True)
        joined = join_scores(
            [_score_rows(*each) for each in zip(pieces, wanted, asked, strict=True)]
        )
        scores += joined[min(start, 1) :]  # the reference once
    return scores


def _score_rows(
    logits: Sequence[torch.Tensor], targets: torch.Tensor, watched: torch.Tensor
) -> list[TokenScores]:
    """Reduce the logits [N, V] of the reference and of each candidate; targets are [N, 1]."""
    reference = torch.log_softmax(logits[0], -1, dtype=torch.float32)
    nothing = torch.empty(len(targets), 0, device=targets.device)
    seen = nothing
    if watched.shape[1]:
        seen = torch.cat([reference.gather(1, watched), reference.amax(1, keepdim=True)], 1)
    zeros = torch.zeros(len(targets), device=targets.device)
    scores = [
        TokenScores(
            logprobs=reference.gather(1, targets).squeeze(1),
            klds=zeros,
            agrees=zeros == 0,
            ties=zeros != 0,
            watched=seen,
        )
    ]
    if len(logits) == 1:
        return scores
    probabilities = torch.softmax(logits[0], -1, dtype=torch.float32)
    best = find_largest(logits[0])
    for found in logits[1:]:
        candidate = torch.log_softmax(found, -1, dtype=torch.float32)
        logprobs = candidate.gather(1, targets).squeeze(1)
        top = find_largest(found)
        agrees = (top == best).squeeze(1)
        ties = (found.gather(1, best) == found.gather(1, top)).squeeze(1) & ~agrees
        difference = torch.sub(reference, candidate, out=candidate)
        klds = difference.mul_(probabilities).sum(-1)
        scores.append(
            TokenScores(
                logprobs=logprobs,
                klds=klds.clamp_(min=0),
                agrees=agrees,
                ties=ties,
                watched=nothing,
            )
        )
    return scores


def find_largest(logits: torch.Tensor) -> torch.Tensor:
    """Find the place of the largest element of each row, the first of equal ones: [N, V] -> [N, 1].

    On a CPU torch finds the largest values of blocks three to eight times as fast as a place among
    all, so that the place is looked for in one block.
    """
    found: torch.Tensor
    if logits.device.type != "cpu":
        found = logits.max(-1, keepdim=True).indices
        return found
    rows, size = logits.shape
    count = size // _BLOCK
    largest = logits[:, : count * _BLOCK].view(rows, count, _BLOCK).amax(-1)
    if count * _BLOCK < size:
        rest = logits[:, count * _BLOCK :].amax(-1, keepdim=True)
        largest = torch.cat([largest, rest], 1)
    first = largest.argmax(-1, keepdim=True) * _BLOCK
    columns = (first + torch.arange(_BLOCK)).clamp_(max=size - 1)
    found = columns.gather(1, logits.gather(1, columns).argmax(-1, keepdim=True))
    return found


def select_lengths(chosen: torch.Tensor, lengths: Sequence[int]) -> list[int]:
    """Give the lengths of what is left if only the chosen scored tokens, bool [N], are kept."""
    counts = (int(part.sum()) for part in split_sequences(chosen, lengths))
    return [count + 1 for count in counts if count]


def split_sequences(values: torch.Tensor, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """Cut per-token values [N] into those of each sequence: [length - 1]."""
    return iter(torch.split(values, [length - 1 for length in lengths]))


# --- the output head ------------------------------------------------------------------------------


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is untyped
    """The output of a text decoder: the hidden states, and None for every other field."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def open_lm_head(model: PreTrainedModel) -> Iterator[Logits]:
    """Give the function from hidden states [N, C] to logits [N, V], in the model's dtype.

    It is the model's own forward, or that of the text model in one that takes no text without
    images (BLIP-2), scaling and soft caps included, so no knowledge of the
    architecture is needed: while the context is open, the text decoder is replaced by one that
    returns the given hidden states.
    """
    path, decoder = find_text_decoder(model)
    parts, owner, given = path.split("."), None, torch.zeros(0)
    for size in range(len(parts)):  # the outermost model whose forward takes text alone
        around = model.get_submodule(".".join(parts[:size]))
        needed = [
            each
            for each in signature(around.forward).parameters.values()
            if each.default is each.empty and each.kind not in _REST
        ]
        if isinstance(around, PreTrainedModel) and {each.name for each in needed} <= {"input_ids"}:
            owner = around
            break
    if owner is None:
        raise VerificationError(f"{type(model).__name__}: its forward takes no text without images")

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
