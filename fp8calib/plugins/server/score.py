"""Let a server score sequences, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fp8calib.errors import Fp8CalibError, ModelError, ServerError
from fp8calib.machine.progress import Progress
from fp8calib.plugins.server.client import (
    Endpoint,
    RequestCount,
    Response,
    ServerClient,
    hidden_key,
    run_to_end,
)
from fp8calib.plugins.server.decoding import Decoded, count_written
from fp8calib.plugins.server.kinds.kind import (
    AnswerError,
    SequenceScores,
    ServerKind,
    ServerScores,
)
from fp8calib.plugins.server.recognise import (
    Server,
    check_length,
    check_tokenizer,
    recognise,
)
from fp8calib.plugins.server.written import SEED, count_given

T = TypeVar("T")
_CONNECTING_S = 60.0
"""The longest wait for an answer before the text is sent: none of these requests runs the model."""
_OTHER_VOCABULARY = ("vocab",)
_TOO_LONG = (
    "context length",
    "max_model_len",
    "max_total_tokens",
    "max_input",
    "too long",
    "longer",
)
_TOO_MANY_LOGPROBS = ("logprobs",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is asked."""

    endpoint: Endpoint
    model: str | None
    kind: str | None
    likely_kind: str | None
    """Of a server that is not recognised."""
    num_top: int
    """The tokens at every position whose log-probabilities are asked for."""
    concurrency: int
    timeout_s: float
    count: RequestCount = field(default_factory=RequestCount)
    """Counts grow during the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedServer:
    """A server that is ready to score text."""

    options: ServerOptions
    server: Server
    vocab_size: int
    """The size of the model's vocabulary."""

    def score(
        self, sequences: Sequence[torch.Tensor], progress: Progress, *, stage: str
    ) -> ServerScores:
        """Ask for the log-probabilities of sequences of token ids: 1-D int64.

        Raises:
            ServerError: the server fails, or answers with something else.
            ModelError: it has another model.
        """
        kind, num_top = self.server.kind, self.options.num_top

        async def ask(client: ServerClient, number: int) -> SequenceScores:
            ids = sequences[number].tolist()
            request = kind.make_scoring(self.server.model, ids, num_top)
            answer = await client.post(kind.path, request)
            where = f"{client.endpoint.url}{kind.path}: "
            if not answer.is_ok:
                raise _refuse(kind, where, answer, len(ids), num_top)
            if answer.body is None:
                raise ServerError(
                    f"{where}the answer is not JSON: {answer.text}",
                    hint="is there a proxy before the server? name the server itself",
                )
            try:
                scores = kind.read_scores(answer.body, ids, num_top)
            except AnswerError as error:
                raise ServerError(
                    f"{where}the answer to sequence {number} (counting from 0) {error.message}",
                    hint=error.hint or f"is it a {kind.name} server? its log may name the cause",
                ) from error
            self._require_vocabulary(f"{where}the answer", scores.top_ids.flatten().tolist())
            return scores

        return ServerScores(
            url=self.options.endpoint.url,
            kind=kind.name,
            model=self.server.model,
            sequences=self._ask_each(sequences, ask, progress, stage),
        )

    def write(
        self, sequences: Sequence[torch.Tensor], progress: Progress
    ) -> tuple[torch.Tensor, ...]:
        """Replace every sequence, but for its first tokens, by what it writes at temperature 1.

        Raises:
            ServerError: the server fails, or cannot continue token ids.
        """
        kind, given = self.server.kind, count_given(sequences)

        async def ask(client: ServerClient, number: int) -> torch.Tensor:
            start, count = sequences[number][:given].tolist(), len(sequences[number]) - given
            request = kind.make_writing(self.server.model, start, count, SEED + number)
            more = await self._continue(
                client, number, request, lambda body: kind.read_written(body, count)
            )
            self._require_vocabulary(self._name_continuation(number), more)
            return torch.tensor([*start, *more])

        return self._ask_each(sequences, ask, progress, "writing text")

    def decode(
        self, sequences: Sequence[torch.Tensor], progress: Progress, *, stage: str
    ) -> tuple[Decoded, ...]:
        """Let it replace the second half of every sequence by the tokens it finds most likely.

        Raises:
            ServerError: the server fails, or cannot continue token ids.
        """
        kind = self.server.kind

        async def ask(client: ServerClient, number: int) -> Decoded:
            count = count_written(len(sequences[number]))
            start = sequences[number][:-count].tolist()
            request = kind.make_decoding(self.server.model, start, count)
            more = await self._continue(
                client, number, request, lambda body: kind.read_decoded(body, count)
            )
            tokens, logprobs = zip(*more, strict=True)
            self._require_vocabulary(self._name_continuation(number), tokens)
            ids = torch.tensor([*start, *tokens])
            return Decoded(ids=ids, logprobs=torch.tensor(logprobs, dtype=torch.float32))

        return self._ask_each(sequences, ask, progress, stage)

    async def _continue(
        self,
        client: ServerClient,
        number: int,
        request: Mapping[str, Any],
        read: Callable[[Any], T],
    ) -> T:
        """Ask for the continuation of a sequence."""
        path = self.server.kind.path
        try:
            answer = await client.post(path, request)
            if not answer.is_ok:
                raise AnswerError(f"is {answer.status}: {answer.text}")
            return read(answer.body)
        except AnswerError as error:
            raise ServerError(
                f"{client.endpoint.url}{path}: the continuation of sequence {number} "
                f"{error.message}",
                hint=error.hint or "the server's log may name the cause",
            ) from error

    def _name_continuation(self, number: int) -> str:
        return f"{self.options.endpoint.url}: the continuation of sequence {number}"

    def _require_vocabulary(self, where: str, tokens: Sequence[int]) -> None:
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            raise ModelError(
                f"{where} has token {largest}, and the model has {self.vocab_size} tokens",
                hint="the server has another model: name the one that is served",
            )

    def _ask_each(
        self,
        sequences: Sequence[torch.Tensor],
        ask: Callable[[ServerClient, int], Awaitable[T]],
        progress: Progress,
        stage: str,
    ) -> tuple[T, ...]:
        """Ask about every sequence, several at once; the first error ends all."""
        progress.stage(stage, sum(map(len, sequences)), unit="tokens")
        numbers = iter(range(len(sequences)))
        found: dict[int, T] = {}

        async def work(client: ServerClient) -> None:
            for number in numbers:
                found[number] = await ask(client, number)
                progress.advance(len(sequences[number]))

        async def run() -> None:
            async with _open_client(self.options) as client, asyncio.TaskGroup() as tasks:
                for _ in range(self.options.concurrency):
                    tasks.create_task(work(client))

        with hidden_key(self.options.endpoint):
            try:
                run_to_end(run())
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
        return tuple(found[number] for number in range(len(sequences)))


def connect(
    options: ServerOptions,
    sequences: Sequence[torch.Tensor],
    tokenizer: Any | None,
    *,
    vocab_size: int,
) -> ConnectedServer:
    """Find out what runs behind the URL, and refuse what cannot score `sequences`.

    Raises:
        ServerError: it is no server of a known kind, it fails, or takes only shorter text.
        ModelError: it has another model.
    """

    async def ask() -> Server:
        timeout_s = min(options.timeout_s, _CONNECTING_S)
        async with _open_client(replace(options, timeout_s=timeout_s)) as client:
            server = await recognise(
                client,
                kind=options.kind,
                model=options.model,
                likely_kind=options.likely_kind,
            )
            check_length(server, client, max(map(len, sequences)))
            note = "the tokenizers were not compared: the model has none"
            if tokenizer is not None:
                note = await check_tokenizer(server, client, tokenizer, sequences[0].tolist())
            return replace(server, note=f"{options.endpoint.option}: {note}" if note else "")

    with hidden_key(options.endpoint):
        server = run_to_end(ask())
    return ConnectedServer(options=options, server=server, vocab_size=vocab_size)


def _open_client(options: ServerOptions) -> ServerClient:
    return ServerClient(
        options.endpoint,
        timeout_s=options.timeout_s,
        concurrency=options.concurrency,
        count=options.count,
    )


def _refuse(
    kind: ServerKind, where: str, answer: Response, length: int, num_top: int
) -> Fp8CalibError:
    """Explain an answer that is an error; name the server's option where one helps."""
    text = answer.text.lower()
    what = f"{where}answers {answer.status}: {answer.text}"
    if any(word in text for word in _OTHER_VOCABULARY):
        return ModelError(what, hint="the server has another model: name the one that is served")
    if any(word in text for word in _TOO_MANY_LOGPROBS):
        hint = (
            f"use a smaller --server-logprobs than {num_top}, or start the server with "
            f"{kind.logprobs_flag}"
        )
    elif any(word in text for word in _TOO_LONG):
        hint = (
            f"use a --seq-len below {length}, or start the server with a larger {kind.length_flag}"
        )
    elif answer.status == 404:
        hint = f"it has no {kind.path}: name its kind with --server-kind"
    else:
        hint = "the server's log may name the cause"
    return ServerError(what, hint=hint)
