"""Let a server score sequences, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fp8calib.errors import Fp8CalibError, ModelError, ServerError
from fp8calib.machine.progress import Progress
from fp8calib.verification.server.client import (
    Endpoint,
    RequestCount,
    Response,
    ServerClient,
    hidden_key,
    run_to_end,
)
from fp8calib.verification.server.decoding import Decoded, count_written
from fp8calib.verification.server.kinds.kind import (
    AnswerError,
    SequenceScores,
    ServerKind,
    ServerScores,
)
from fp8calib.verification.server.recognise import (
    Server,
    check_length,
    check_tokenizer,
    recognise,
)
from fp8calib.verification.server.written import SEED, count_given

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
class ServerText:
    """What is sent to a server."""

    sequences: Sequence[torch.Tensor]
    """Token ids: 1-D int64."""
    vocab_size: int
    """The size of the model's vocabulary."""


def connect(
    options: ServerOptions, sequences: Sequence[torch.Tensor], tokenizer: Any | None
) -> Server:
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
        return run_to_end(ask())


def score(
    options: ServerOptions,
    server: Server,
    text: ServerText,
    progress: Progress,
    *,
    stage: str,
) -> ServerScores:
    """Ask a server for the log-probabilities of a text.

    Raises:
        ServerError: the server fails, or answers with something else.
        ModelError: it has another model.
    """
    progress.stage(stage, sum(map(len, text.sequences)), unit="tokens")

    async def ask(client: ServerClient, number: int) -> SequenceScores:
        return await _ask(client, server, text, number, options.num_top)

    with hidden_key(options.endpoint):
        found = _ask_each(options, text.sequences, ask, progress)
    return ServerScores(
        url=options.endpoint.url,
        kind=server.kind.name,
        model=server.model,
        sequences=tuple(found),
    )


def write(
    options: ServerOptions,
    server: Server,
    text: ServerText,
    progress: Progress,
) -> tuple[torch.Tensor, ...]:
    """Replace every sequence, but for its first tokens, by what a server writes at temperature 1.

    Raises:
        ServerError: the server fails, or cannot continue token ids.
    """
    sequences = text.sequences
    given = count_given(sequences)
    progress.stage("writing text", sum(map(len, sequences)), unit="tokens")

    async def ask(client: ServerClient, number: int) -> torch.Tensor:
        start, count = sequences[number][:given].tolist(), len(sequences[number]) - given

        def make() -> Mapping[str, Any]:
            return server.kind.make_writing(server.model, start, count, SEED + number)

        def read(body: Any) -> list[int]:
            return server.kind.read_written(body, count)

        more = await _continue(client, server, number, make, read)
        _require_vocabulary(_name_continuation(options, number), more, text)
        return torch.tensor([*start, *more])

    with hidden_key(options.endpoint):
        return tuple(_ask_each(options, sequences, ask, progress))


def decode(
    options: ServerOptions, server: Server, text: ServerText, progress: Progress, *, stage: str
) -> tuple[Decoded, ...]:
    """Let a server replace the second half of every sequence by the tokens it finds most likely.

    Raises:
        ServerError: the server fails, or cannot continue token ids.
    """
    sequences = text.sequences
    progress.stage(stage, sum(map(len, sequences)), unit="tokens")

    async def ask(client: ServerClient, number: int) -> Decoded:
        count = count_written(len(sequences[number]))
        start = sequences[number][:-count].tolist()

        def make() -> Mapping[str, Any]:
            return server.kind.make_decoding(server.model, start, count)

        def read(body: Any) -> list[tuple[int, float]]:
            return server.kind.read_decoded(body, count)

        more = await _continue(client, server, number, make, read)
        tokens, logprobs = zip(*more, strict=True)
        _require_vocabulary(_name_continuation(options, number), tokens, text)
        ids = torch.tensor([*start, *tokens])
        return Decoded(ids=ids, logprobs=torch.tensor(logprobs, dtype=torch.float32))

    with hidden_key(options.endpoint):
        return tuple(_ask_each(options, sequences, ask, progress))


async def _continue(
    client: ServerClient,
    server: Server,
    number: int,
    make: Callable[[], Mapping[str, Any]],
    read: Callable[[Any], T],
) -> T:
    """Ask for the continuation of a sequence."""
    path = server.kind.path
    try:
        answer = await client.post(path, make())
        if not answer.is_ok:
            raise AnswerError(f"is {answer.status}: {answer.text}")
        return read(answer.body)
    except AnswerError as error:
        raise ServerError(
            f"{client.endpoint.url}{path}: the continuation of sequence {number} {error.message}",
            hint=error.hint or "the server's log may name the cause",
        ) from error


def _ask_each(
    options: ServerOptions,
    sequences: Sequence[torch.Tensor],
    ask: Callable[[ServerClient, int], Awaitable[T]],
    progress: Progress,
) -> list[T]:
    """Ask about every sequence, several at once; the first error ends all."""
    numbers = iter(range(len(sequences)))
    found: dict[int, T] = {}

    async def work(client: ServerClient) -> None:
        for number in numbers:
            found[number] = await ask(client, number)
            progress.advance(len(sequences[number]))

    async def run() -> None:
        async with _open_client(options) as client, asyncio.TaskGroup() as tasks:
            for _ in range(options.concurrency):
                tasks.create_task(work(client))

    try:
        run_to_end(run())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [found[number] for number in range(len(sequences))]


def _open_client(options: ServerOptions) -> ServerClient:
    return ServerClient(
        options.endpoint,
        timeout_s=options.timeout_s,
        concurrency=options.concurrency,
        count=options.count,
    )


async def _ask(
    client: ServerClient, server: Server, text: ServerText, number: int, num_top: int
) -> SequenceScores:
    kind, ids = server.kind, text.sequences[number].tolist()
    request = kind.make_scoring(server.model, ids, num_top)
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
        _require_vocabulary(f"{where}the answer", scores.top_ids.flatten().tolist(), text)
        return scores
    except AnswerError as error:
        raise ServerError(
            f"{where}the answer to sequence {number} (counting from 0) {error.message}",
            hint=error.hint or f"is it a {kind.name} server? its log may name the cause",
        ) from error


def _name_continuation(options: ServerOptions, number: int) -> str:
    return f"{options.endpoint.url}: the continuation of sequence {number}"


def _require_vocabulary(where: str, tokens: Sequence[int], text: ServerText) -> None:
    largest = max(tokens, default=0)
    if largest >= text.vocab_size:
        raise ModelError(
            f"{where} has token {largest}, and the model has {text.vocab_size} tokens",
            hint="the server has another model: name the one that is served",
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
