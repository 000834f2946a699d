"""The rows of a text that a run used, as the model sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8calib.data.processor import MediaEncoder
from fp8calib.data.rows import has_chat_template
from fp8calib.data.tokenize import PackedRows
from fp8calib.errors import fit_line

_HEAD_TOKENS, _TAIL_TOKENS = 40, 12
_HEAD_CHARS, _TAIL_CHARS = 100, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsUsed:
    """The rows that a run read and used, with the first used ones as examples."""

    read: int
    """Rows after the last one that is needed are not read."""
    used: int
    too_short: int
    """Rows without the tokens of a sequence."""
    rejected: int
    """Conversations that the chat template does not accept."""
    cut: int
    """Used rows whose last tokens are in no sequence."""
    conversations: int
    """Rows read that are messages or instructions."""
    chat_template: str | None
    """sha256 (hex) of the tokenizer's or processor's chat template if it was applied, else None."""
    examples: tuple[str, ...]
    """The beginning and the end of the first rows used, special tokens included; one line each."""

    def to_json(self) -> dict[str, Any]:
        """Give the fields for a report."""
        return asdict(self) | {"examples": list(self.examples)}

    def describe(self) -> Iterator[str]:
        """Describe the rows in a few lines: their number, the chat template, the examples."""
        beside = (
            (self.too_short, "too short"),
            (self.rejected, "rejected by the chat template"),
            (self.cut, "cut at their end"),
        )
        notes = "".join(f", {count:,} {what}" for count, what in beside if count)
        yield f"rows: {self.used:,} used of {self.read:,} read{notes}"
        yield f"chat template: {self._describe_template()}"
        for number, text in enumerate(self.examples, start=1):
            yield f"row {number}: {text}"

    def _describe_template(self) -> str:
        if not self.conversations:
            return "not applied, as no row is a conversation"
        if self.chat_template is None:
            return "the tokenizer has none: instruction and answer are joined as plain text"
        return (
            f"the tokenizer's (sha256 {self.chat_template[:12]}), applied to "
            f"{self.conversations:,} of {self.read:,} rows"
        )


def summarize_rows(
    found: PackedRows,
    conversations: int,
    rejected: int,
    tokenizer: Any,
    encoder: MediaEncoder | None = None,
) -> RowsUsed:
    """Summarize rows; where none needed `tokenizer` or `encoder`, examples are token ids."""
    template = tokenizer
    if encoder is not None:
        tokenizer = tokenizer or encoder.tokenizer
        template = encoder.template
    return RowsUsed(
        read=found.num_rows + rejected,
        used=found.num_used,
        too_short=found.num_dropped,
        rejected=rejected,
        cut=found.num_cut,
        conversations=conversations,
        chat_template=_hash_template(template) if conversations else None,
        examples=tuple(_shorten_row(ids, tokenizer) for ids in found.first),
    )


def _hash_template(tokenizer: Any) -> str | None:
    if not has_chat_template(tokenizer):
        return None
    template = tokenizer.chat_template
    if not isinstance(template, str):  # several, by their names
        template = tokenizer.get_chat_template()
    return hashlib.sha256(template.encode()).hexdigest()


def _shorten_row(ids: Sequence[int], tokenizer: Any) -> str:
    if len(ids) <= _HEAD_TOKENS + _TAIL_TOKENS:
        return _cut_middle(_show_tokens(ids, tokenizer), "")
    return _cut_middle(
        _show_tokens(ids[:_HEAD_TOKENS], tokenizer), _show_tokens(ids[-_TAIL_TOKENS:], tokenizer)
    )


def _cut_middle(head: str, tail: str) -> str:
    """Join the first characters of `head` and the last ones of `tail`, or of `head`."""
    if not tail and len(head) <= _HEAD_CHARS + _TAIL_CHARS:
        return head
    return f"{head[:_HEAD_CHARS]} ... {(tail or head)[-_TAIL_CHARS:]}"


def _show_tokens(ids: Sequence[int], tokenizer: Any) -> str:
    decode = getattr(tokenizer, "decode", None)
    if decode is None:
        return f"token ids {' '.join(map(str, ids))}"
    return fit_line(decode(list(ids), skip_special_tokens=False))
