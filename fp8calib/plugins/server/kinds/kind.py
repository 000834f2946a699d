"""What every kind of server is asked, and what it answers: token ids, then log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_ROUNDING = 1e-3
"""A value above 0 by more than this is not a log-probability."""
_MOST_PROBABILITY = 1.01
"""The sum of probabilities exceeds 1 by less than this through rounding."""
_LARGEST_TOKEN = 2**31 - 1


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


class ServerKind(Protocol):
    """The API of one kind of server."""

    name: str
    path: str
    """Where token ids are sent."""
    length_flag: str
    """The option of the server that allows longer prompts."""
    logprobs_flag: str
    """The option of the server that allows log-probabilities of more tokens, or of any."""
    cache_flag: str
    """The option of the server that turns prompt caching off."""

    def make_scoring(self, model: str, ids: Sequence[int], num_top: int) -> Mapping[str, Any]:
        """Make the request for the log-probabilities of `ids`."""

    def read_scores(self, body: Any, ids: Sequence[int], num_top: int) -> SequenceScores:
        """Read the answer.

        Raises:
            AnswerError: it is not what was asked for.
        """

    def make_writing(
        self, model: str, ids: Sequence[int], count: int, seed: int
    ) -> Mapping[str, Any]:
        """Make the request to continue `ids` by `count` tokens, drawn at temperature 1."""

    def read_written(self, body: Any, count: int) -> list[int]:
        """Read the tokens of the continuation.

        Raises:
            AnswerError: they are not what was asked for.
        """

    def make_decoding(self, model: str, ids: Sequence[int], count: int) -> Mapping[str, Any]:
        """Make the request to continue `ids` by the `count` most likely tokens."""

    def read_decoded(self, body: Any, count: int) -> list[tuple[int, float]]:
        """Read the tokens of the continuation with their log-probabilities.

        Raises:
            AnswerError: they are not what was asked for.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What an answer says about one token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def join_positions(
    positions: Sequence[Position], ids: Sequence[int], num_top: int, kind: ServerKind
) -> SequenceScores:
    """Join what an answer says about tokens 2..L of `ids`, whose count was checked.

    Raises:
        AnswerError: there are other tokens, or no log-probabilities.
    """
    for place, (position, expected) in enumerate(zip(positions, ids[1:], strict=True), start=1):
        if position.token != expected:
            raise AnswerError(
                f"is about another text: token {place} is {position.token}, not {expected}",
                hint="is there a proxy that changes prompts? name the server itself",
            )
        _require_logprob(position.logprob, place)
        if len(position.top) < num_top:
            raise AnswerError(
                f"has {len(position.top)} tokens at position {place}, and {num_top} were asked for",
                hint=f"use a smaller --server-logprobs, or start the server with "
                f"{kind.logprobs_flag}",
            )
        for _, logprob in position.top:
            _require_logprob(logprob, place)
        if sum(math.exp(logprob) for _, logprob in position.top) > _MOST_PROBABILITY:
            raise AnswerError(
                f"has tokens at position {place} whose probabilities add up to more than 1",
                hint="does it send logits (vLLM: --logprobs-mode)? is there a proxy?",
            )
    tops = [position.top[:num_top] for position in positions]
    return SequenceScores(
        logprobs=torch.tensor([position.logprob for position in positions], dtype=torch.float32),
        top_ids=_make_table(tops, 0, torch.int64, num_top),
        top_logprobs=_make_table(tops, 1, torch.float32, num_top),
    )


def check_count(count: int, ids: Sequence[int], kind: ServerKind, *, is_first: bool) -> None:
    """Refuse an answer about more or fewer tokens than 2..L of `ids`.

    `is_first` tells that they are the first of them. A cache of prompts leaves out first ones.

    Raises:
        AnswerError: naming both numbers.
    """
    if count != len(ids) - 1:
        raise AnswerError(
            f"has log-probabilities of {count} tokens, not of {len(ids) - 1}",
            hint="they are the first ones of the prompt: is there a proxy that cuts it, or a limit "
            "of the server? name the server itself, or use a smaller --seq-len"
            if is_first
            else f"if the server caches prompts, start it with {kind.cache_flag}",
        )


def _make_table(
    tops: Sequence[Sequence[tuple[int, float]]], column: int, dtype: torch.dtype, width: int
) -> torch.Tensor:
    rows = [[pair[column] for pair in top] for top in tops]
    return torch.tensor(rows, dtype=dtype).reshape(len(tops), width)


def _require_logprob(value: float, place: int) -> None:
    if math.isfinite(value) and value <= _ROUNDING:
        return
    if value > 0 and math.isfinite(value):
        said = "is above 0"
        hint = "does it send logits (vLLM: --logprobs-mode)? if not, look at its attention backend"
    else:
        said = "is NaN or inf"
        hint = "the server's logits are broken: look at its scales, dtype and attention backend"
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


def sort_top(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Sort tokens by their log-probability, the largest first."""
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


def find(body: Any, *path: str | int) -> Any:
    """Find a value inside an answer.

    Raises:
        AnswerError: it is not there.
    """
    found = body
    for depth, step in enumerate(path):
        is_there = (
            isinstance(found, dict) and step in found
            if isinstance(step, str)
            else isinstance(found, list) and step < len(found)
        )
        if not is_there:
            named = ".".join(map(str, path[: depth + 1]))
            raise AnswerError(f"has no {named}", hint="name the kind with --server-kind")
        found = found[step]
    return found


def find_list(body: Any, *path: str | int) -> list[Any]:
    """Find a list inside an answer.

    Raises:
        AnswerError: it is not there, or not a list.
    """
    found = find(body, *path)
    if not isinstance(found, list):
        named = ".".join(map(str, path))
        raise AnswerError(f"has no list {named}", hint="name the kind with --server-kind")
    return found


def read_token(value: Any) -> int:
    """Read a token id.

    Raises:
        AnswerError: it is not a token id.
    """
    is_token = isinstance(value, int) and 0 <= value <= _LARGEST_TOKEN
    if isinstance(value, bool) or not is_token:
        raise AnswerError(f"has {str(value)[:40]!r} where a token id belongs")
    return int(value)


def read_number(value: Any) -> float:
    """Read a log-probability.

    Raises:
        AnswerError: it is not a number.
    """
    try:
        number = None if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = None
    if number is None:
        raise AnswerError(f"has {str(value)[:40]!r} where a log-probability belongs")
    return number


def read_tokens(values: Sequence[Any], count: int) -> list[int]:
    """Read the token ids of a continuation.

    Raises:
        AnswerError: there are more or fewer than `count`.
    """
    if len(values) != count:
        raise AnswerError(
            f"continues the text by {len(values)} tokens, not by {count}",
            hint="the server stopped early; use the plain completions endpoint, without a chat "
            "template",
        )
    return [read_token(value) for value in values]
