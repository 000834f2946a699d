"""TGI: `/generate` with `decoder_input_details`. It takes text; what it made of it is compared.

Source: text-generation-inference router/src/server.rs (`generate_internal`), read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8calib.verification.server.kinds.kind import (
    AnswerError,
    Position,
    SequenceScores,
    check_count,
    find,
    find_list,
    join_decoded,
    join_positions,
    read_number,
    read_token,
    read_tokens,
)


class TgiServer:
    """The native API of TGI."""

    name = "tgi"
    path = "/generate"
    takes_ids = False
    most_logprobs: int | None = 0
    length_flag = "--max-input-tokens and --max-total-tokens"
    logprobs_flag = "--enable-prefill-logprobs"
    cache_flag = "PREFIX_CACHING=0 in its environment"

    def make_scoring(
        self,
        model: str,  # noqa: ARG002 -- a server has one model
        ids: Sequence[int],  # noqa: ARG002 -- the text is sent
        text: str,
        num_top: int,  # noqa: ARG002 -- it reports none of a prompt
    ) -> Mapping[str, Any]:
        """Ask for the log-probabilities of a prompt."""
        return {
            "inputs": text,
            "parameters": {"max_new_tokens": 1, "details": True, "decoder_input_details": True},
        }

    def read_scores(self, body: Any, ids: Sequence[int], num_top: int) -> SequenceScores:
        """Read `details.prefill`: id and log-probability of every token, null for the first."""
        found = find_list(body, "details", "prefill")
        if not found:
            raise AnswerError(
                "has no log-probabilities of the prompt",
                hint=f"start the server with {self.logprobs_flag}",
            )
        tokens = [read_token(find(entry, "id")) for entry in found]
        if tokens != list(ids):
            raise AnswerError(
                f"is about another text: {len(ids)} tokens were sent as text, and the server read "
                f"{len(tokens)} others from it",
                hint="its tokenizer differs from the model's: is it another model?",
            )
        rows = [_read_position(entry) for entry in found[1:]]
        check_count(len(rows), ids, self)
        return join_positions(rows, ids, num_top, self)

    def make_writing(
        self,
        model: str,  # noqa: ARG002 -- refused
        ids: Sequence[int],  # noqa: ARG002
        count: int,  # noqa: ARG002
        seed: int,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Refuse: ids cannot be sent."""
        raise AnswerError("cannot continue token ids", hint="use a vLLM or SGLang server")

    def read_written(self, body: Any, count: int) -> list[int]:
        """Read the generated tokens."""
        tokens = find_list(body, "details", "tokens")
        return read_tokens([find(token, "id") for token in tokens], count)

    def make_decoding(self, model: str, ids: Sequence[int], count: int) -> Mapping[str, Any]:
        """Refuse: ids cannot be sent."""
        return self.make_writing(model, ids, count, 0)

    def read_decoded(self, body: Any, count: int) -> list[tuple[int, float]]:
        """Read the generated tokens with their log-probabilities."""
        found = find_list(body, "details", "tokens")
        logprobs = [read_number(find(token, "logprob")) for token in found]
        return join_decoded(self.read_written(body, count), logprobs)


def _read_position(entry: Any) -> Position:
    logprob = find(entry, "logprob")
    number = float("nan") if logprob is None else read_number(logprob)
    return Position(token=read_token(find(entry, "id")), logprob=number)
