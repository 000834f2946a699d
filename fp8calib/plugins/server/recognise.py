"""Find out what runs behind a URL: its kind, its model, and whether it is the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8calib.errors import ModelError, ServerError, UsageError, cut_list, shorten
from fp8calib.plugins.server.client import Response, ServerClient
from fp8calib.plugins.server.kinds.kind import ServerKind
from fp8calib.plugins.server.kinds.sglang import SglangServer
from fp8calib.plugins.server.kinds.vllm import VllmServer

_ALL: tuple[ServerKind, ...] = (VllmServer(), SglangServer())
KINDS = {kind.name: kind for kind in _ALL}
_PROBE = 'The quick brown fox: 3.14, "na\u00efve" \u6771\u4eac\n\tdef f(x): return x**2'
_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What runs behind a URL."""

    kind: ServerKind
    model: str
    """The name that requests give."""
    max_length: int | None
    """The longest prompt and answer together, in tokens; None if the server does not say."""
    note: str = ""
    """What could not be checked."""


async def recognise(
    client: ServerClient, *, kind: str | None, model: str | None, likely_kind: str | None = None
) -> Server:
    """Find the kind and the model of a server; `kind` and `model` are what the user named.

    A server that is not recognised is of the `likely_kind`.

    Raises:
        ServerError: it is no server of a known kind, or it fails.
        ModelError: it serves another model than the one named, or several.
    """
    models = await client.get("/v1/models")
    cards = _list_cards(models)
    found = KINDS[kind] if kind else _find_kind(client, models, cards, likely_kind)
    card = _choose_card(client, cards, model)
    return Server(
        kind=found,
        model=model or _read_name(card.get("id")),
        max_length=_read_length(card.get("max_model_len")),
    )


def _list_cards(models: Response) -> list[dict[str, Any]]:
    data = models.body.get("data") if isinstance(models.body, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


def _find_kind(
    client: ServerClient, models: Response, cards: Sequence[dict[str, Any]], likely: str | None
) -> ServerKind:
    for card in cards:
        if (owner := _read_name(card.get("owned_by"))) in KINDS:
            return KINDS[owner]
    if likely:
        return KINDS[likely]
    raise ServerError(
        f"{client.endpoint.url}: no vLLM or SGLang server: /v1/models answers "
        f"{models.status}: {models.text}",
        hint=f"check the URL, or name its kind with --server-kind: {', '.join(KINDS)}",
    )


def _choose_card(
    client: ServerClient, cards: Sequence[dict[str, Any]], model: str | None
) -> dict[str, Any]:
    names = [_read_name(card.get("id")) for card in cards]
    if model is None and len(cards) == 1:
        return cards[0]
    if model in names:
        return cards[names.index(model)]
    if model is not None and not cards:
        return {}  # a server that does not list its models
    if model is None and not cards:
        raise ServerError(
            f"{client.endpoint.url}: the server lists no models",
            hint=f"name the model with {client.endpoint.model_option}",
        )
    what = f"does not serve {shorten(model)}" if model else f"serves {len(cards)} models"
    raise ModelError(
        f"{client.endpoint.url}: the server {what}; it has {cut_list(names)}",
        hint=f"name one of them with {client.endpoint.model_option}",
    )


def _read_name(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _read_length(value: Any) -> int | None:
    is_length = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_length else None


def check_length(server: Server, client: ServerClient, longest: int) -> None:
    """Refuse sequences that are too long for the server; it generates one token after each.

    Raises:
        ServerError: naming the server's option.
    """
    if server.max_length is not None and longest + 1 > server.max_length:
        raise ServerError(
            f"{client.endpoint.url}: the server takes {server.max_length} tokens, and a sequence "
            f"of {longest} needs {longest + 1}",
            hint=f"use --seq-len {server.max_length - 1}, or start the server with "
            f"{server.kind.length_flag} {longest + 1}",
        )


async def check_tokenizer(
    server: Server, client: ServerClient, tokenizer: Any, ids: Sequence[int]
) -> str:
    """Compare the server's tokenizer with the model's, on a text and on the beginning of `ids`.

    Returns:
        Why it could not be compared; empty if the two agree.

    Raises:
        ModelError: they differ; the message has the first difference.
    """
    for text in (_PROBE, tokenizer.decode(list(ids[:_PROBE_TOKENS]))):
        here = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        there = await _tokenize(server, client, text)
        if there is None:
            return "the tokenizers were not compared: the server has no /tokenize"
        if there != here:
            pairs = enumerate(zip(here, there, strict=False))
            shorter = min(len(here), len(there))
            place = next((number for number, (one, other) in pairs if one != other), shorter)
            raise ModelError(
                f"{client.endpoint.url}: the server has another model: its tokenizer turns "
                f"{shorten(text[:40])!r} into {_show(there, place)}, and the model's into "
                f"{_show(here, place)}",
                hint="name the model that is served, or the right server",
            )
    return ""


def _show(ids: Sequence[int], place: int) -> str:
    first = max(place - 2, 0)
    shown = ", ".join(map(str, ids[first : place + 3]))
    return f"{'..., ' if first else ''}{shown} ({len(ids)} tokens)"


async def _tokenize(server: Server, client: ServerClient, text: str) -> list[Any] | None:
    body: dict[str, Any] = {"model": server.model, "prompt": text, "add_special_tokens": False}
    answer = await client.post("/tokenize", body)
    tokens = answer.body.get("tokens") if answer.is_ok and isinstance(answer.body, dict) else None
    return tokens if isinstance(tokens, list) else None


def require_kind(name: str | None) -> None:
    """Refuse a kind of server that is not known.

    Raises:
        UsageError: naming the known ones.
    """
    if name is not None and name not in KINDS:
        raise UsageError(f"--server-kind {name}: unknown", hint=f"known: {', '.join(KINDS)}")
