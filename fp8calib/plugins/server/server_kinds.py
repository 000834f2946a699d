"""The kinds of servers that can be asked, by name: what they are sent, and how they answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel, Field

from fp8calib.plugins.server.answers import (
    PLAIN_SAMPLING,
    AnswerError,
    Logprob,
    ServerScores,
    Token,
    TokenKey,
    check_tokens,
    check_written,
    join_answer,
    read,
)

_CLAMPED = -9999.0
"""What vLLM writes for minus infinity."""


class _Entry(BaseModel):
    logprob: Logprob


class _TokenLogprobs(BaseModel):
    token_logprobs: list[Logprob]


class _Choice(BaseModel):
    prompt_logprobs: list[dict[TokenKey, _Entry] | None] | None = None
    token_ids: list[Token] | None = None
    logprobs: _TokenLogprobs | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class VllmServer:
    """The completions API of vLLM: `/v1/completions` with `prompt_logprobs`.

    Source: vllm 0.32 entrypoints/openai/completion/protocol.py, run.
    """

    name = "vllm"
    path = "/v1/completions"
    length_flag = "--max-model-len"
    logprobs_flag = "--max-logprobs"
    cache_flag = "--no-enable-prefix-caching"

    def make_scoring(self, model: str, ids: Sequence[int], num_top: int) -> Mapping[str, Any]:
        """Ask for the log-probabilities of a prompt."""
        return {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": num_top,
            "add_special_tokens": False,
        }

    def read_scores(self, body: Any, ids: Sequence[int], num_top: int) -> ServerScores:
        """Read `prompt_logprobs`: for every position a map of tokens, the first one null."""
        found = read(_Completion, body).choices[0].prompt_logprobs
        if found is None:
            raise AnswerError(
                "has no prompt_logprobs", hint="is it a vLLM server? name it with --server-kind"
            )
        rows = [
            {token: _raise_clamped(entry.logprob) for token, entry in row.items()}
            for row in found
            if row is not None
        ]
        sent = [ids[place] if place < len(ids) else -1 for place in range(1, len(rows) + 1)]
        tokens = [
            token if token in row else max(row, key=lambda other: row[other], default=-1)
            for row, token in zip(rows, sent, strict=True)
        ]
        check_tokens(tokens, ids, self.cache_flag)
        logprobs = [row[token] for row, token in zip(rows, tokens, strict=True)]
        tops = [list(row.items()) for row in rows]
        return join_answer(logprobs, tops, num_top, self.logprobs_flag)

    def make_writing(
        self, model: str, ids: Sequence[int], count: int, seed: int | None
    ) -> Mapping[str, Any]:
        """Ask for a continuation that is drawn; without a seed, for the most likely one."""
        how = {"temperature": 0.0, "logprobs": 1} if seed is None else {}
        return {
            "model": model,
            "prompt": list(ids),
            "max_tokens": count,
            "min_tokens": count,
            **PLAIN_SAMPLING,
            "top_k": 0,
            "seed": seed or 0,
            "add_special_tokens": False,
            "return_token_ids": True,
            **how,
        }

    def read_written(
        self, body: Any, count: int, *, is_drawn: bool
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Read `token_ids`, and `logprobs.token_logprobs` of the most likely continuation."""
        choice = read(_Completion, body).choices[0]
        found = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        logprobs = None if is_drawn else list(map(_raise_clamped, found))
        return check_written(choice.token_ids or (), logprobs, count)


def _raise_clamped(logprob: float) -> float:
    return -math.inf if logprob <= _CLAMPED else logprob


_Pair = tuple[Logprob | None, Token, Any]
"""Log-probability, null for NaN and infinity; token; text."""


class _Meta(BaseModel):
    input_token_logprobs: list[_Pair] = []
    input_top_logprobs: list[list[_Pair] | None] = []
    output_token_logprobs: list[_Pair] = []


class _Generated(BaseModel):
    output_ids: list[Token] = []
    meta_info: _Meta = _Meta()


class SglangServer:
    """The native API of SGLang: `/generate` with `input_ids` and `return_logprob`.

    Source: sglang 0.5.23 srt/managers/io_struct.py, tokenizer_manager.py and
    scheduler_components/logprob_result_processor.py, read.
    """

    name = "sglang"
    path = "/generate"
    length_flag = "--context-length"
    logprobs_flag = "a larger --context-length"
    cache_flag = "--disable-radix-cache"

    def make_scoring(self, _: str, ids: Sequence[int], num_top: int) -> Mapping[str, Any]:
        """Ask for the log-probabilities of a prompt; a server has one model."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": num_top,
        }

    def read_scores(self, body: Any, ids: Sequence[int], num_top: int) -> ServerScores:
        """Read `input_token_logprobs` and `input_top_logprobs`; the first of each is null."""
        meta = read(_Generated, body).meta_info
        rows = list(map(_read_pair, meta.input_token_logprobs))
        if rows and math.isnan(rows[0][1]):
            del rows[0]
        last = max(ids)
        tokens = [
            # it writes 0 for the last token of the vocabulary
            last if not token and list(ids[place : place + 1]) == [last] else token
            for place, (token, _) in enumerate(rows, start=1)
        ]
        check_tokens(tokens, ids, self.cache_flag)
        tops = [row for row in meta.input_top_logprobs if row is not None]
        if num_top and len(tops) != len(rows):
            raise AnswerError(
                f"has the most likely tokens of {len(tops)} positions, not of {len(rows)}"
            )
        likely = [list(map(_read_pair, row)) for row in tops] if num_top else [[] for _ in rows]
        return join_answer([logprob for _, logprob in rows], likely, num_top, self.logprobs_flag)

    def make_writing(
        self, _: str, ids: Sequence[int], count: int, seed: int | None
    ) -> Mapping[str, Any]:
        """Ask for a continuation that is drawn; without a seed, for the most likely one."""
        how = {"temperature": 0.0} if seed is None else {}
        return {
            "input_ids": list(ids),
            "sampling_params": {
                **PLAIN_SAMPLING,
                "max_new_tokens": count,
                "min_new_tokens": count,
                "top_k": -1,
                "sampling_seed": seed or 0,
                **how,
            },
            "return_logprob": seed is None,
        }

    def read_written(
        self, body: Any, count: int, *, is_drawn: bool
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Read `output_ids`, and `output_token_logprobs` of the most likely continuation."""
        answer = read(_Generated, body)
        found = answer.meta_info.output_token_logprobs
        logprobs = None if is_drawn else [_read_pair(pair)[1] for pair in found]
        return check_written(answer.output_ids, logprobs, count)


def _read_pair(pair: _Pair) -> tuple[int, float]:
    """Give a token and its log-probability."""
    return pair[1], math.nan if pair[0] is None else pair[0]


ServerKind: TypeAlias = VllmServer | SglangServer
KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VllmServer(), SglangServer())}
