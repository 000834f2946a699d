"""Find out what runs behind a URL: its kind, its model, and whether it is the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8calib.errors import ModelError, ServerError, cut_list, shorten
from fp8calib.plugins.server.client import ServerClient
from fp8calib.plugins.server.server_kinds import KINDS, ServerKind

_PROBE = 'The quick brown fox: 3.14, "na\u00efve" \u6771\u4eac\n\tdef f(x): return x**2'
_PROBE_TOKENS = 64


async def identify(
    client: ServerClient, *, kind: str | None, model: str | None, likely_kind: str | None
) -> tuple[ServerKind, str, int | None]:
    """Find the kind and the model of a server; `kind` and `model` are what the user named.

    A server that is not recognised is of the `likely_kind`.

    Returns:
        Its kind, the name that requests give the model, and the longest prompt and answer together,
        in tokens; None if the server does not say.

    Raises:
        ServerError: it is no server of a known kind, or it fails.
        ModelError: it serves another model than the one named, or several.
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


async def check_tokenizer(
    model: str, client: ServerClient, tokenizer: Any, ids: Sequence[int]
) -> str:
    """Compare the server's tokenizer with the model's, on a text and on the beginning of `ids`.

    Returns:
        Why it could not be compared; empty if the two agree.

    Raises:
        ModelError: they differ; the message has the first difference.
    """
    for text in (_PROBE, tokenizer.decode(list(ids[:_PROBE_TOKENS]))):
        here = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = await client.ask("/tokenize", body)
        is_known = answer.is_ok and isinstance(answer.body, dict)
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
