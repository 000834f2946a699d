"""What servers are sent and how their answers are read.

The answers of vLLM are as `tests/real_engines/test_vllm_server.py` gets them. Those of SGLang are
not recorded from a running server: they have the form that the source of sglang 0.5.23
(`srt/managers/tokenizer_manager.py`) gives them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fp8calib.plugins.server.answers import AnswerError
from fp8calib.plugins.server.kinds import KINDS

IDS = [5, 3, 8]
SGLANG = json.loads(
    """{"text": " a", "output_ids": [7], "meta_info": {
    "id": "e2b9", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3,
    "weight_version": "default", "num_retractions": 0,
    "input_token_logprobs": [[null, 5, null], [-1.5, 3, null], [-0.25, 8, null]],
    "output_token_logprobs": [[-0.5, 7, null]], "output_token_logprobs_length": 1,
    "input_top_logprobs": [null, [[-0.5, 4, null], [-1.5, 3, null]],
                           [[-0.25, 8, null], [-2.0, 1, null]]],
    "output_top_logprobs": [[[-0.5, 7, null], [-1.0, 2, null]]],
    "reasoning_tokens": 0, "completion_tokens": 1, "cached_tokens": 0}}"""
)
VLLM = json.loads(
    """{"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [{"index": 0,
    "text": " a", "logprobs": null, "finish_reason": "length", "stop_reason": null,
    "token_ids": [7], "prompt_logprobs": [null,
    {"3": {"logprob": -1.5, "rank": 2, "decoded_token": "y"},
     "4": {"logprob": -0.5, "rank": 1, "decoded_token": "v"}},
    {"8": {"logprob": -0.25, "rank": 1, "decoded_token": "z"},
     "1": {"logprob": -2.0, "rank": 2, "decoded_token": "u"}}]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}}"""
)
ANSWERS = {"vllm": VLLM, "sglang": SGLANG}


@pytest.mark.parametrize("name", KINDS)
def test_a_continuation(name: str) -> None:
    assert KINDS[name].read_written(ANSWERS[name], 1) == [7]
    with pytest.raises(AnswerError, match="by 1 tokens, not by 2"):
        KINDS[name].read_written(ANSWERS[name], 2)


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("sglang", ("meta_info", "input_token_logprobs"), [[-1.5, 3, None]], "of 1 tokens, not"),
        ("sglang", ("meta_info", "input_token_logprobs"), [], "of 0 tokens, not of 2"),
        (
            "sglang",
            ("meta_info", "input_token_logprobs"),
            None,
            "meta_info.input_token_logprobs: .*valid list",
        ),
        ("sglang", ("meta_info", "input_top_logprobs"), [None], "of 0 positions, not of 2"),
        ("vllm", ("choices",), [], "choices: .*at least 1 item"),
    ],
)
def test_what_is_missing_is_named(name: str, path: tuple[str, ...], value: Any, says: str) -> None:
    answer = json.loads(json.dumps(ANSWERS[name]))
    place = answer
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(AnswerError, match=says):
        KINDS[name].read_scores(answer, IDS, 2)
