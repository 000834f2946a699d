"""What servers answer, read and checked: token ids, and their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, ValidationError

_ROUNDING = 1e-3
"""A value above 0 by more than this is not a log-probability."""
_MOST_PROBABILITY = 1.01
"""The sum of probabilities exceeds 1 by less than this through rounding."""
_LARGEST_TOKEN = 2**31 - 1
Token = Annotated[int, Field(strict=True, ge=0, le=_LARGEST_TOKEN)]
TokenKey = Annotated[int, Field(ge=0, le=_LARGEST_TOKEN)]
"""A token as the key of a JSON object."""
Logprob = Annotated[float, Field(strict=True)]
FormT = TypeVar("FormT", bound=BaseModel)

PLAIN_SAMPLING: Mapping[str, Any] = {
    "ignore_eos": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Tokens from the whole distribution; what the model's generation_config says is overridden."""


class AnswerError(Exception):
    """An answer that is not what the kind of server gives."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceScores:
    """What a server says about the L tokens of one sequence."""

    logprobs: torch.Tensor
    """log p(token | earlier tokens), for tokens 2..L, in nats: fp32 [L - 1]."""
    top_ids: torch.Tensor
    """The most likely tokens there, most likely first: int64 [L - 1, K]."""
    top_logprobs: torch.Tensor
    """Their log-probabilities: fp32 [L - 1, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerScores:
    """What a server answered: about every sequence, in order."""

    url: str
    kind: str
    model: str
    sequences: tuple[SequenceScores, ...]

    @property
    def logprobs(self) -> torch.Tensor:
        """The log-probability of every token: fp32 [N], sequences in order."""
        return torch.cat([each.logprobs for each in self.sequences])

    @property
    def num_top(self) -> int:
        """The number of tokens it reports at a position."""
        return self.sequences[0].top_ids.shape[1]


def check_tokens(tokens: Sequence[int], ids: Sequence[int], cache_flag: str) -> None:
    """Refuse an answer about other tokens than 2..L of `ids`.

    A cache of prompts, which the server's option `cache_flag` turns off, leaves out first ones.

    Raises:
        AnswerError: naming the first difference.
    """
    sent = list(ids[1:])
    if len(tokens) != len(sent):
        hint = f"if the server caches prompts, start it with {cache_flag}"
        if list(tokens) == sent[: len(tokens)]:
            hint = (
                "they are the first ones of the prompt: is there a proxy that cuts it, or a limit "
                "of the server? name the server itself, or use a smaller --seq-len"
            )
        raise AnswerError(
            f"has log-probabilities of {len(tokens)} tokens, not of {len(sent)}", hint=hint
        )
    for place, (token, expected) in enumerate(zip(tokens, sent, strict=True), start=1):
        if token != expected:
            raise AnswerError(
                f"is about another text (position {place}): token {place} is {token}, not "
                f"{expected}",
                hint="is there a proxy that changes prompts? name the server itself",
            )


def join_answer(
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]],
    num_top: int,
    logprobs_flag: str,
) -> SequenceScores:
    """Join the log-probabilities of tokens with those of the most likely ones, in any order.

    Raises:
        AnswerError: one is no log-probability, or there are fewer than `num_top` at a position.
    """
    rows = [sorted(top, key=lambda pair: -pair[1]) for top in tops]
    for place, (logprob, row) in enumerate(zip(logprobs, rows, strict=True), start=1):
        _require_logprob(logprob, place)
        if len(row) < num_top:
            raise AnswerError(
                f"has {len(row)} tokens at position {place}, and {num_top} were asked for",
                hint=f"use a smaller --server-logprobs, or start the server with {logprobs_flag}",
            )
        for _, likely in row:
            _require_logprob(likely, place)
        if sum(math.exp(likely) for _, likely in row) > _MOST_PROBABILITY:
            raise AnswerError(
                f"has tokens at position {place} whose probabilities add up to more than 1",
                hint="does it send logits (vLLM: --logprobs-mode)? is there a proxy?",
            )
    shape = (len(rows), num_top)
    return SequenceScores(
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        top_ids=torch.tensor(
            [[token for token, _ in row[:num_top]] for row in rows], dtype=torch.int64
        ).reshape(shape),
        top_logprobs=torch.tensor(
            [[likely for _, likely in row[:num_top]] for row in rows], dtype=torch.float32
        ).reshape(shape),
    )


def _require_logprob(value: float, place: int) -> None:
    if math.isfinite(value) and value <= _ROUNDING:
        return
    said = "is NaN or inf"
    hint = "the server's logits are broken: look at its scales, dtype and attention backend"
    if math.isfinite(value):
        said = "is above 0"
        hint = "does it send logits (vLLM: --logprobs-mode)? if not, look at its attention backend"
    raise AnswerError(
        f"has a log-probability that {said} ({value:g}) at position {place}", hint=hint
    )


def join_decoded(tokens: Sequence[int], logprobs: Sequence[float]) -> list[tuple[int, float]]:
    """Join the tokens of a continuation with their log-probabilities.

    Raises:
        AnswerError: there are more or fewer log-probabilities, or one is none.
    """
    if len(tokens) != len(logprobs):
        raise AnswerError(f"has {len(logprobs)} log-probabilities of {len(tokens)} written tokens")
    for place, logprob in enumerate(logprobs):
        _require_logprob(logprob, place)
    return list(zip(tokens, logprobs, strict=True))


def read(form: type[FormT], body: Any) -> FormT:
    """Read an answer of a form.

    Raises:
        AnswerError: it has another one; the message names the first difference.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "no object"
        given = "" if first["type"] == "missing" else f" ({str(first['input'])[:40]!r})"
        raise AnswerError(
            f"has another form: {place}: {first['msg']}{given}",
            hint="name the kind with --server-kind",
        ) from error


def check_count(tokens: Sequence[int], count: int) -> list[int]:
    """Give the tokens of a continuation.

    Raises:
        AnswerError: there are more or fewer than `count`.
    """
    if len(tokens) != count:
        raise AnswerError(
            f"continues the text by {len(tokens)} tokens, not by {count}",
            hint="the server stopped early; use the plain completions endpoint, without a chat "
            "template",
        )
    return list(tokens)
