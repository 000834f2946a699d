"""A server that is ready to score and to write text, several sequences at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any, TypeVar

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.errors import Fp8CalibError, ModelError, ServerError, cut_list, shorten
from fp8calib.plugins.server.answers import AnswerError, ServerScores, WrittenSequence
from fp8calib.plugins.server.client import Response, ServerClient, run_to_end
from fp8calib.plugins.server.model_text import SAMPLING_SEED, count_given
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.served import count_prompt
from fp8calib.plugins.server.server_kinds import KINDS, ServerKind

T = TypeVar("T")
_CONNECTING_S = 60.0
"""The longest wait for an answer before the text is sent: none of these requests runs the model."""
_PROBE = 'The quick brown fox: 3.14, "na\u00efve" \u6771\u4eac\n\tdef f(x): return x**2'
_PROBE_TOKENS = 64
_OTHER_MODEL = "the server has another model: name the one that is served"
_TOO_LONG = (
    "context length",
    "max_model_len",
    "max_total_tokens",
    "max_input",
    "too long",
    "longer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that is ready."""

    request: ServerRequest
    """How it is asked."""
    client: ServerClient
    kind: ServerKind
    model: str
    """The name that requests give."""
    vocab_size: int
    """The size of the model's vocabulary."""
    note: str = ""
    """What could not be checked."""

    def score(
        self, sequences: Sequence[torch.Tensor], progress: Progress, *, stage: str
    ) -> ServerScores:
        """Ask for the log-probabilities of sequences of token ids (1-D int64), in order."""
        kind, num_top = self.kind, self.request.server_logprobs

        async def ask(number: int) -> ServerScores:
            ids = sequences[number].tolist()
            body = kind.make_scoring(self.model, ids, num_top)
            scores = await self._ask(
                body, lambda answer: kind.read_scores(answer, ids, num_top), number
            )
            self._require_vocabulary(scores.top_ids.flatten().tolist(), number)
            return scores

        parts = self._ask_each(sequences, ask, progress, stage)
        names = [field.name for field in fields(ServerScores)]
        return ServerScores(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        )

    def write(
        self, sequences: Sequence[torch.Tensor], progress: Progress, *, stage: str, is_drawn: bool
    ) -> tuple[WrittenSequence, ...]:
        """Let it continue the beginning of every sequence to its length.

        Tokens are drawn at temperature 1 after the first few, or they are the most likely ones
        after the first half.
        """
        kind, few = self.kind, count_given(sequences)

        async def ask(number: int) -> WrittenSequence:
            length = len(sequences[number])
            given = few if is_drawn else count_prompt(length)
            start, count = sequences[number][:given].tolist(), length - given
            seed = SAMPLING_SEED + number if is_drawn else None
            tokens, logprobs = await self._ask(
                kind.make_writing(self.model, start, count, seed),
                lambda answer: kind.read_written(answer, count, is_drawn=is_drawn),
                number,
            )
            self._require_vocabulary(tokens, number)
            return WrittenSequence(
                ids=torch.tensor([*start, *tokens]),
                num_prompt=given,
                logprobs=torch.tensor(logprobs, dtype=torch.float32),
            )

        return self._ask_each(sequences, ask, progress, stage)

    async def _ask(self, body: Mapping[str, Any], read: Callable[[Any], T], number: int) -> T:
        """Send a request about a sequence, and read the answer."""
        answer = await self.client.ask(self.kind.path, body)
        if answer.status != HTTPStatus.OK:
            raise self._refuse(answer)
        where = f"{self.client.url}{self.kind.path}: the answer"
        if answer.body is None:
            raise ServerError(
                f"{where} is not JSON: {answer.text}",
                hint="is there a proxy before the server? name the server itself",
            )
        try:
            return read(answer.body)
        except AnswerError as error:
            raise ServerError(
                f"{where} to sequence {number} (counting from 0) {error.message}",
                hint=error.hint or f"is it a {self.kind.name} server? its log may name the cause",
            ) from error

    def _refuse(self, answer: Response) -> Fp8CalibError:
        """Explain an answer that is an error; name the server's option where one helps."""
        kind, request = self.kind, self.request
        text = answer.text.lower()
        what = f"{self.client.url}{kind.path}: answers {answer.status}: {answer.text}"
        if "vocab" in text:
            return ModelError(what, hint=_OTHER_MODEL)
        hint = "the server's log may name the cause"
        if "logprobs" in text:
            hint = f"use a smaller --server-logprobs than {request.server_logprobs}, or start the "
            hint += f"server with {kind.logprobs_flag}"
        elif any(word in text for word in _TOO_LONG):
            hint = f"use a smaller --seq-len, or start the server with a larger {kind.length_flag}"
        elif answer.status == 404:
            hint = f"it has no {kind.path}: name its kind with --server-kind"
        return ServerError(what, hint=hint)

    def _require_vocabulary(self, tokens: Sequence[int], number: int) -> None:
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            raise ModelError(
                f"{self.client.url}: the answer to sequence {number} has token {largest}, and "
                f"the model has {self.vocab_size} tokens",
                hint=_OTHER_MODEL,
            )

    def _ask_each(
        self,
        sequences: Sequence[torch.Tensor],
        ask: Callable[[int], Awaitable[T]],
        progress: Progress,
        stage: str,
    ) -> tuple[T, ...]:
        """Ask about every sequence, several at once; the first error ends all."""
        progress.stage(stage, sum(map(len, sequences)), unit="tokens")
        numbers = iter(range(len(sequences)))
        found: dict[int, T] = {}

        async def work() -> None:
            for number in numbers:
                found[number] = await ask(number)
                progress.advance(len(sequences[number]))

        async def run() -> None:
            concurrency = self.request.server_concurrency
            connected = self.client.connected(self.request.server_timeout, concurrency)
            async with connected, asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(work())

        try:
            run_to_end(run())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return tuple(found[number] for number in range(len(sequences)))


def connect(
    request: ServerRequest,
    client: ServerClient,
    model: str | None,
    kind: str | None,
    sequences: Sequence[torch.Tensor],
    tokenizer: Any | None,
    vocab_size: int,
) -> Server:
    """Find out what runs behind the URL, and refuse what cannot score `sequences`.

    `model` and `kind` are what the user named.
    """

    async def ask() -> Server:
        timeout_s = min(request.server_timeout, _CONNECTING_S)
        async with client.connected(timeout_s, request.server_concurrency):
            found, name, most = await _identify(
                client, kind=kind, model=model, likely_kind=request.server_kind
            )
            longest = max(map(len, sequences))
            if most is not None and longest + 1 > most:  # it generates a token after each sequence
                raise ServerError(
                    f"{client.url}: the server takes {most} tokens, and a sequence of {longest} "
                    f"needs {longest + 1}",
                    hint=f"use --seq-len {most - 1}, or start the server with {found.length_flag} "
                    f"{longest + 1}",
                )
            note = "the tokenizers were not compared: the model has none"
            if tokenizer is not None:
                note = await _check_tokenizer(name, client, tokenizer, sequences[0].tolist())
            return Server(
                request=request,
                client=client,
                kind=found,
                model=name,
                vocab_size=vocab_size,
                note=f"{client.option}: {note}" if note else "",
            )

    return run_to_end(ask())


async def _identify(
    client: ServerClient, *, kind: str | None, model: str | None, likely_kind: str | None
) -> tuple[ServerKind, str, int | None]:
    """Find the kind and the model of a server; `kind` and `model` are what the user named.

    A server that is not recognised is of the `likely_kind`.

    Give its kind, the name that requests give the model, and the longest prompt and answer
    together, in tokens; None if the server does not say.
    """
    models = await client.ask("/v1/models")
    data = models.body.get("data") if isinstance(models.body, dict) else None
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    owners = [owner for card in cards if (owner := _read_name(card, "owned_by")) in KINDS]
    known = kind or next(iter(owners), likely_kind)
    if known is None:
        raise ServerError(
            f"{client.url}: no vLLM or SGLang server: /v1/models answers "
            f"{models.status}: {models.text}",
            hint=f"check the URL, or name its kind with --server-kind: {', '.join(KINDS)}",
        )
    card = _choose_card(client, cards, model)
    length = card.get("max_model_len")
    is_length = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return KINDS[known], model or _read_name(card, "id"), length if is_length else None


def _choose_card(
    client: ServerClient, cards: Sequence[dict[str, Any]], model: str | None
) -> dict[str, Any]:
    names = [_read_name(card, "id") for card in cards]
    if model is None and len(cards) == 1:
        return cards[0]
    if model in names:
        return cards[names.index(model)]
    hint = f"with {client.model_option}"
    if not cards:
        if model is not None:
            return {}  # a server that does not list its models
        why = f"{client.url}: the server lists no models"
        raise ServerError(why, hint=f"name the model {hint}")
    what = f"does not serve {shorten(model)}" if model else f"serves {len(cards)} models"
    raise ModelError(
        f"{client.url}: the server {what}; it has {cut_list(names)}",
        hint=f"name one of them {hint}",
    )


def _read_name(card: dict[str, Any], key: str) -> str:
    return value if isinstance(value := card.get(key), str) else ""


async def _check_tokenizer(
    model: str, client: ServerClient, tokenizer: Any, ids: Sequence[int]
) -> str:
    """Compare the server's tokenizer with the model's, on a text and on the beginning of `ids`.

    Give the reason if they could not be compared; empty if the two agree.
    """
    for text in (_PROBE, tokenizer.decode(list(ids[:_PROBE_TOKENS]))):
        here = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = await client.ask("/tokenize", body)
        is_known = answer.status == HTTPStatus.OK and isinstance(answer.body, dict)
        there = answer.body.get("tokens") if is_known else None
        if not isinstance(there, list):
            return "the tokenizers were not compared: the server has no /tokenize"
        if there != here:
            pairs = enumerate(zip(here, there, strict=False))
            shorter = min(len(here), len(there))
            place = next((number for number, (one, other) in pairs if one != other), shorter)
            raise ModelError(
                f"{client.url}: the server has another model: its tokenizer turns "
                f"{shorten(text[:40])!r} into {_show(there, place)}, and the model's into "
                f"{_show(here, place)}",
                hint="name the model that is served, or the right server",
            )
    return ""


def _show(ids: Sequence[int], place: int) -> str:
    first = max(place - 2, 0)
    shown = ", ".join(map(str, ids[first : place + 3]))
    return f"{'..., ' if first else ''}{shown} ({len(ids)} tokens)"
