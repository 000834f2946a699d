"""vLLM: `/v1/completions` with `prompt_logprobs`.

Source: vllm 0.32 entrypoints/openai/completion/protocol.py, run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8calib.plugins.server.kinds.kind import (
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
    """The completions API of vLLM."""

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
