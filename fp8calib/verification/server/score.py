"""Let a server score sequences: several at once, each kept as soon as it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration import Progress
from fp8calib.errors import Fp8CalibError, ModelError, VerificationError
from fp8calib.verification.server.client import Answer, Endpoint, ServerClient
from fp8calib.verification.server.kinds.kind import (
    AnswerError,
    SequenceScores,
    ServerKind,
    ServerScores,
)
from fp8calib.verification.server.partial import PartialScores
from fp8calib.verification.server.recognise import (
    Server,
    check_length,
    check_tokenizer,
    recognise,
)
from fp8calib.verification.server.written import SEED, count_given

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerText:
    """What is sent to a server."""

    sequences: Sequence[torch.Tensor]
    """Token ids: 1-D int64."""
    fingerprint: str
    """Identifies them."""
    tokenizer: Any | None
    """Of the model; None if it has none."""


def connect(
    options: ServerOptions, sequences: Sequence[torch.Tensor], tokenizer: Any | None
) -> Server:
    """Find out what runs behind the URL, and refuse what cannot score `sequences`.

    Raises:
        VerificationError: it is no server of a known kind, it fails, or takes only shorter text.
        ModelError: it has another model.
    """

    async def ask() -> Server:
        async with _open_client(options) as client:
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

    return asyncio.run(ask())


def score(
    options: ServerOptions,
    server: Server,
    text: ServerText,
    progress: Progress,
    *,
    folder: Path,
    resume: bool,
    stage: str,
) -> ServerScores:
    """Ask a server for the log-probabilities of a text.

    What was answered is kept in `folder` if the server fails or the run is interrupted.

    Raises:
        VerificationError: the server fails, or answers with something else.
        ModelError: it has another model.
    """
    most = server.kind.most_logprobs
    num_top = options.num_top if most is None else min(options.num_top, most)
    tag = "\0".join((options.endpoint.url, server.model, text.fingerprint, str(num_top)))
    partial = PartialScores(folder, tag)
    progress.stage(stage, sum(map(len, text.sequences)), unit="tokens")

    numbers = range(len(text.sequences))
    partial.open(resume=resume)

    async def handle(client: ServerClient, number: int) -> None:
        partial.add(number, await _ask(client, server, text, number, num_top))
        progress.advance(len(text.sequences[number]))

    try:
        for number in partial.found:
            progress.advance(len(text.sequences[number]))
        _handle_each(options, [n for n in numbers if n not in partial.found], handle)
    except Fp8CalibError as error:
        if partial.found:
            kept = f"{len(partial.found)} of {len(numbers)} sequences are kept"
            kept += ": --resume continues with them"
            error.hint = f"{error.hint}; {kept}" if error.hint else kept
        raise
    finally:
        partial.close()
    partial.remove()
    return ServerScores(
        url=options.endpoint.url,
        kind=server.kind.name,
        model=server.model,
        sequences=tuple(partial.found[number] for number in numbers),
    )


def spell_out(ids: Sequence[int], tokenizer: Any | None) -> str | None:
    """Find the text that the tokenizer, with its special tokens, reads as `ids`; None if none is.

    A text does not begin with the BOS that the tokenizer adds to it.
    """
    if tokenizer is None:
        return None
    for start in (0, 1):
        text = str(tokenizer.decode(list(ids[start:])))
        if list(tokenizer(text)["input_ids"]) == list(ids):
            return text
    return None


def write(
    options: ServerOptions, server: Server, sequences: Sequence[torch.Tensor], progress: Progress
) -> tuple[torch.Tensor, ...]:
    """Replace every sequence, but for its first tokens, by what a server writes at temperature 1.

    Raises:
        VerificationError: the server fails, or cannot continue token ids.
    """
    given = count_given(sequences)
    progress.stage("writing text", sum(map(len, sequences)), unit="tokens")
    written: dict[int, torch.Tensor] = {}

    async def handle(client: ServerClient, number: int) -> None:
        start, count = sequences[number][:given].tolist(), len(sequences[number]) - given
        written[number] = torch.tensor([*start, *await ask(client, start, count, number)])
        progress.advance(len(sequences[number]))

    async def ask(client: ServerClient, start: list[int], count: int, number: int) -> list[int]:
        kind, where = server.kind, f"{options.endpoint.url}{server.kind.path}: "
        try:
            request = kind.make_writing(server.model, start, count, SEED + number)
            answer = await client.post(kind.path, request)
            if not answer.is_ok:
                raise AnswerError(f"is {answer.status}: {answer.text}")
            return kind.read_written(answer.body, count)
        except AnswerError as error:
            raise VerificationError(
                f"{where}the continuation of sequence {number} {error.message}",
                hint=error.hint or "the server's log may name the cause",
            ) from error

    _handle_each(options, range(len(sequences)), handle)
    return tuple(written[number] for number in range(len(sequences)))


def _handle_each(
    options: ServerOptions,
    numbers: Iterable[int],
    handle: Callable[[ServerClient, int], Awaitable[None]],
) -> None:
    """Handle sequences by their numbers, several at once; the first error ends all."""
    left = iter(numbers)

    async def work(client: ServerClient) -> None:
        for number in left:
            await handle(client, number)

    async def run() -> None:
        async with _open_client(options) as client, asyncio.TaskGroup() as tasks:
            for _ in range(options.concurrency):
                tasks.create_task(work(client))

    try:
        asyncio.run(run())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _open_client(options: ServerOptions) -> ServerClient:
    return ServerClient(
        options.endpoint, timeout_s=options.timeout_s, concurrency=options.concurrency
    )


async def _ask(
    client: ServerClient, server: Server, text: ServerText, number: int, num_top: int
) -> SequenceScores:
    kind, ids = server.kind, text.sequences[number].tolist()
    spelled = None if kind.takes_ids else spell_out(ids, text.tokenizer)
    request = kind.make_scoring(server.model, ids, spelled or "", num_top)
    answer = await client.post(kind.path, request)
    where = f"{client.endpoint.url}{kind.path}: "
    if not answer.is_ok:
        raise _refuse(kind, where, answer, len(ids), num_top)
    if answer.body is None:
        raise VerificationError(
            f"{where}the answer is not JSON: {answer.text}",
            hint="is there a proxy before the server? name the server itself",
        )
    try:
        return kind.read_scores(answer.body, ids, num_top)
    except AnswerError as error:
        raise VerificationError(
            f"{where}the answer to sequence {number} (counting from 0) {error.message}",
            hint=error.hint or f"is it a {kind.name} server? its log may name the cause",
        ) from error


def _refuse(
    kind: ServerKind, where: str, answer: Answer, length: int, num_top: int
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
    return VerificationError(what, hint=hint)
