"""The kinds of servers that can be asked, by name: what they are sent, and how they answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fp8calib.plugins.server.answers import (
    PLAIN_SAMPLING,
    AnswerError,
    SequenceScores,
    check_tokens,
    find,
    find_list,
    join_decoded,
    join_scores,
    read_number,
    read_token,
    read_tokens,
)

_CLAMPED = -9999.0
"""What vLLM writes for minus infinity."""


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

    def read_scores(self, body: Any, ids: Sequence[int], num_top: int) -> SequenceScores:
        """Read `prompt_logprobs`: for every position a map of tokens, the first one null."""
        found = find(body, "choices", 0, "prompt_logprobs")
        if not isinstance(found, list):
            raise AnswerError(
                "has no prompt_logprobs", hint="is it a vLLM server? name it with --server-kind"
            )
        rows = [_read_row(row) for row in found if row is not None]
        sent = [ids[place] if place < len(ids) else -1 for place in range(1, len(rows) + 1)]
        tokens = [
            token if token in row else max(row, key=lambda other: row[other], default=-1)
            for row, token in zip(rows, sent, strict=True)
        ]
        check_tokens(tokens, ids, self.cache_flag)
        logprobs = [row[token] for row, token in zip(rows, tokens, strict=True)]
        tops = [list(row.items()) for row in rows]
        return join_scores(logprobs, tops, num_top, self.logprobs_flag)

    def make_writing(
        self, model: str, ids: Sequence[int], count: int, seed: int
    ) -> Mapping[str, Any]:
        """Ask for a continuation."""
        return {
            "model": model,
            "prompt": list(ids),
            "max_tokens": count,
            "min_tokens": count,
            **PLAIN_SAMPLING,
            "top_k": 0,
            "seed": seed,
            "add_special_tokens": False,
            "return_token_ids": True,
        }

    def read_written(self, body: Any, count: int) -> list[int]:
        """Read `token_ids`."""
        return read_tokens(find_list(body, "choices", 0, "token_ids"), count)

    def make_decoding(self, model: str, ids: Sequence[int], count: int) -> Mapping[str, Any]:
        """Ask for the most likely continuation."""
        return {**self.make_writing(model, ids, count, 0), "temperature": 0.0, "logprobs": 1}

    def read_decoded(self, body: Any, count: int) -> list[tuple[int, float]]:
        """Read `token_ids` and `logprobs.token_logprobs`."""
        found = find_list(body, "choices", 0, "logprobs", "token_logprobs")
        return join_decoded(self.read_written(body, count), list(map(_read_logprob, found)))


def _read_row(row: Any) -> dict[int, float]:
    if not isinstance(row, dict):
        raise AnswerError(f"has {str(row)[:40]!r} where log-probabilities belong")
    try:
        return {
            read_token(int(token)): _read_logprob(find(entry, "logprob"))
            for token, entry in row.items()
        }
    except ValueError as error:
        raise AnswerError("names a token that is no number in prompt_logprobs") from error


def _read_logprob(value: Any) -> float:
    number = read_number(value)
    return float("-inf") if number <= _CLAMPED else number


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

    def read_scores(self, body: Any, ids: Sequence[int], num_top: int) -> SequenceScores:
        """Read `input_token_logprobs` and `input_top_logprobs`; the first of each is null."""
        found = find_list(body, "meta_info", "input_token_logprobs")
        rows = [_read_pair(entry) for entry in found]
        if rows and math.isnan(rows[0][1]):
            del rows[0]
        last = max(ids)
        tokens = [
            # it writes 0 for the last token of the vocabulary
            last if not token and list(ids[place : place + 1]) == [last] else token
            for place, (token, _) in enumerate(rows, start=1)
        ]
        check_tokens(tokens, ids, self.cache_flag)
        tops = _read_tops(body, len(rows)) if num_top else [[] for _ in rows]
        return join_scores([logprob for _, logprob in rows], tops, num_top, self.logprobs_flag)

    def make_writing(self, _: str, ids: Sequence[int], count: int, seed: int) -> Mapping[str, Any]:
        """Ask for a continuation."""
        return {
            "input_ids": list(ids),
            "sampling_params": {
                **PLAIN_SAMPLING,
                "max_new_tokens": count,
                "min_new_tokens": count,
                "top_k": -1,
                "sampling_seed": seed,
            },
        }

    def read_written(self, body: Any, count: int) -> list[int]:
        """Read `output_ids`."""
        return read_tokens(find_list(body, "output_ids"), count)

    def make_decoding(self, model: str, ids: Sequence[int], count: int) -> Mapping[str, Any]:
        """Ask for the most likely continuation."""
        request = self.make_writing(model, ids, count, 0)
        sampling = {**request["sampling_params"], "temperature": 0.0}
        return {**request, "sampling_params": sampling, "return_logprob": True}

    def read_decoded(self, body: Any, count: int) -> list[tuple[int, float]]:
        """Read `output_ids` and `output_token_logprobs`."""
        found = find_list(body, "meta_info", "output_token_logprobs")
        logprobs = [_read_pair(entry)[1] for entry in found]
        return join_decoded(self.read_written(body, count), logprobs)


def _read_tops(body: Any, count: int) -> list[list[tuple[int, float]]]:
    found = find_list(body, "meta_info", "input_top_logprobs")
    rows = [row for row in found if row is not None]
    if len(rows) != count:
        raise AnswerError(f"has the most likely tokens of {len(rows)} positions, not of {count}")
    return [[_read_pair(pair) for pair in find_list([row], 0)] for row in rows]


def _read_pair(entry: Any) -> tuple[int, float]:
    """Read a token and its log-probability; NaN and inf come as null."""
    logprob = find(entry, 0)
    return read_token(find(entry, 1)), math.nan if logprob is None else read_number(logprob)


ServerKind: TypeAlias = VllmServer | SglangServer
KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VllmServer(), SglangServer())}
