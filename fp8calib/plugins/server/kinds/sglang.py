"""SGLang: `/generate` with `input_ids` and `return_logprob`.

Source: sglang 0.5.23 srt/managers/io_struct.py, tokenizer_manager.py and
scheduler_components/logprob_result_processor.py, read.
"""

from __future__ import annotations

import math
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


class SglangServer:
    """The native API of SGLang."""

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
