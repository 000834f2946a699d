"""Conversations to token ids, with exactly one BOS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8calib.data.rows import Message, require_unicode
from fp8calib.errors import DataError


def render_messages(tokenizer: Any, messages: Sequence[Message], origin: str) -> list[int]:
    """Apply the tokenizer's chat template and tokenize what it renders.

    Template and tokenizer may both, one or none of them write a BOS. There is one in the result
    when either does, at its start, and none when neither does.

    Raises:
        DataError: there is no template, or it refuses this conversation.

    """
    text = require_unicode(_render(tokenizer, messages, origin), f"{origin}: the rendered chat")
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return _with_one_bos(ids, tokenizer)


def _render(tokenizer: Any, messages: Sequence[Message], origin: str) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except Exception as error:  # a template is a program that may raise anything
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{origin}: the row is a conversation, but the tokenizer has no chat template",
                hint="use rows with `text`, or a chat model",
            ) from error
        raise DataError(
            f"{origin}: the chat template refuses the conversation ({error})",
            hint="check the order and names of its roles",
        ) from error


def _with_one_bos(ids: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    num_leading = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[num_leading:]] if num_leading or _adds_bos(tokenizer) else ids


def _adds_bos(tokenizer: Any) -> bool:
    return list(tokenizer("a", verbose=False)["input_ids"])[:1] == [tokenizer.bos_token_id]
