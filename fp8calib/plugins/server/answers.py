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
class ServerScores:
    """What a server says about the N tokens of a sequence, or of several, but their first ones."""

    logprobs: torch.Tensor
    """log p(token | earlier tokens), in nats: fp32 [N]."""
    top_ids: torch.Tensor
    """The most likely tokens there, most likely first: int64 [N, K]."""
    top_logprobs: torch.Tensor
    """Their log-probabilities: fp32 [N, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSequence:
    """A sequence whose end a server wrote."""

    ids: torch.Tensor
    """All tokens, those of the prompt first: int64 [L]."""
    num_prompt: int
    logprobs: torch.Tensor
    """Of the tokens after the prompt, as they were decoded: fp32 [L - P]; empty if drawn."""


def read(form: type[FormT], body: Any) -> FormT:
    """Read an answer of a form; an error names the first difference."""
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


def check_tokens(tokens: Sequence[int], ids: Sequence[int], cache_flag: str) -> None:
    """Refuse an answer about other tokens than 2..L of `ids`.

    A cache of prompts, which the server's option `cache_flag` turns off, leaves out first ones.
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
) -> ServerScores:
    """Join the log-probabilities of tokens with those of the most likely ones, in any order."""
    rows = [sorted(top, key=lambda pair: -pair[1]) for top in tops]
    for place, (logprob, row) in enumerate(zip(logprobs, rows, strict=True), start=1):
        likely = [each for _, each in row]
        _require_logprobs([logprob], place)
        if len(row) < num_top:
            raise AnswerError(
                f"has {len(row)} tokens at position {place}, and {num_top} were asked for",
                hint=f"use a smaller --server-logprobs, or start the server with {logprobs_flag}",
            )
        _require_logprobs(likely, place)
        if sum(map(math.exp, likely)) > _MOST_PROBABILITY:
            raise AnswerError(
                f"has tokens at position {place} whose probabilities add up to more than 1",
                hint="does it send logits (vLLM: --logprobs-mode)? is there a proxy?",
            )
    best = torch.tensor([row[:num_top] for row in rows], dtype=torch.float64)
    best = best.reshape(len(rows), num_top, 2)  # fp64 holds every token
    return ServerScores(
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        top_ids=best[:, :, 0].long(),
        top_logprobs=best[:, :, 1].float(),
    )


def _require_logprobs(values: Sequence[float], place: int) -> None:
    for value in values:
        if not math.isfinite(value):
            raise AnswerError(
                f"has a log-probability that is NaN or inf ({value:g}) at position {place}",
                hint="the server's logits are broken: look at its scales, dtype and attention "
                "backend",
            )
        if value > _ROUNDING:
            raise AnswerError(
                f"has a log-probability that is above 0 ({value:g}) at position {place}",
                hint="does it send logits (vLLM: --logprobs-mode)? if not, look at its attention "
                "backend",
            )


def check_written(
    tokens: Sequence[int], logprobs: Sequence[float] | None, count: int
) -> tuple[Sequence[int], Sequence[float]]:
    """Give the tokens of a continuation, and their log-probabilities if they were asked for."""
    if len(tokens) != count:
        raise AnswerError(
            f"continues the text by {len(tokens)} tokens, not by {count}",
            hint="the server stopped early; use the plain completions endpoint, without a chat "
            "template",
        )
    if logprobs is None:
        return tokens, ()
    if len(logprobs) != count:
        raise AnswerError(f"has {len(logprobs)} log-probabilities of {count} written tokens")
    for place, logprob in enumerate(logprobs):
        _require_logprobs([logprob], place)
    return tokens, logprobs
