"""Per-token scores of candidates beside the reference; logits are reduced at once, never kept.

Shapes: N tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fp8calib.data.plan import Batch

_LOGITS_AT_ONCE = 2**23
"""Elements of one block of logits on a CPU: 32 MiB in fp32."""
_LOGITS_AT_ONCE_GPU = 2**27

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
    """Whether the most probable token is the reference's: bool [N]."""


def score_batch(
    batch: Batch,
    reference: torch.Tensor,
    candidates: Sequence[torch.Tensor],
    logits: Logits,
    vocab_size: int,
) -> list[TokenScores]:
    """Score a batch: the reference first, then each candidate.

    Args:
        batch: the tokens.
        reference: hidden states of the reference: [B, S, C].
        candidates: those of the candidates.
        logits: the way from hidden states to logits.
        vocab_size: how large a row of logits is.
    """
    index, targets = _predicting_tokens(batch)
    block = _tokens_at_once(reference.device, vocab_size)
    parts = [
        _score_block(
            [hidden.flatten(0, 1)[rows.to(hidden.device)] for hidden in (reference, *candidates)],
            expected,
            logits,
        )
        for rows, expected in zip(
            torch.split(index, block), torch.split(targets, block), strict=True
        )
    ]
    return [join_scores(scores) for scores in zip(*parts, strict=True)]


def join_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Join the scores of parts, in order."""
    return TokenScores(
        logprobs=torch.cat([part.logprobs for part in parts]),
        klds=torch.cat([part.klds for part in parts]),
        agrees=torch.cat([part.agrees for part in parts]),
    )


def _predicting_tokens(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the rows (batch-major) that predict a token, and the tokens they should predict."""
    width = batch.input_ids.shape[1]
    rows = [row * width + torch.arange(length - 1) for row, length in enumerate(batch.lengths)]
    index = torch.cat(rows)
    return index, batch.input_ids.flatten()[index + 1]


def _tokens_at_once(device: torch.device, vocab_size: int) -> int:
    size = _LOGITS_AT_ONCE if device.type == "cpu" else _LOGITS_AT_ONCE_GPU
    return max(size // vocab_size, 16)


def _score_block(
    hidden: Sequence[torch.Tensor], targets: torch.Tensor, logits: Logits
) -> list[TokenScores]:
    reference = torch.log_softmax(logits(hidden[0]).float(), -1)
    targets = targets.to(reference.device).unsqueeze(1)
    probabilities = reference.exp()
    best = reference.argmax(-1, keepdim=True)
    scores = [
        TokenScores(
            logprobs=reference.gather(1, targets).squeeze(1).cpu(),
            klds=torch.zeros(len(targets)),
            agrees=torch.ones(len(targets), dtype=torch.bool),
        )
    ]
    for found in hidden[1:]:
        candidate = torch.log_softmax(logits(found).float(), -1)
        logprobs = candidate.gather(1, targets).squeeze(1)
        # Half the time of another argmax; a tie for the first place agrees.
        agrees = candidate.gather(1, best).squeeze(1) == candidate.amax(-1)
        difference = torch.sub(reference, candidate, out=candidate)
        klds = torch.bmm(probabilities.unsqueeze(1), difference.unsqueeze(2)).flatten()
        scores.append(
            TokenScores(logprobs=logprobs.cpu(), klds=klds.clamp_(min=0).cpu(), agrees=agrees.cpu())
        )
    return scores


def predicted_positions(lengths: Sequence[int]) -> torch.Tensor:
    """Give the position of every scored token inside its sequence: int64 [N], from 1."""
    return torch.cat([torch.arange(1, length) for length in lengths])


def split_sequences(values: torch.Tensor, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """Cut per-token values into those of each sequence (`length - 1` each)."""
    return iter(torch.split(values, [length - 1 for length in lengths]))
