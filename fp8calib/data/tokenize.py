"""Turn rows into token ids, and cut or pack the tokens into sequences."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8calib.data.processor import MediaEncoder, MediaRow
from fp8calib.data.rows import Message, Row, has_chat_template, require_unicode
from fp8calib.data.text_hashes import TOKENS_PER_HASH, TextHashes, hash_text
from fp8calib.errors import DataError, shorten

NUM_SHOWN = 3
"""Rows that a user is shown as examples."""
MIN_TOKENS = 2
"""A shorter sequence predicts nothing."""
EncodedRow = Sequence[int] | MediaRow
"""The token ids of a row, or the row with its media."""


class RejectedRowError(DataError):
    """The chat template does not accept the conversation of a row."""


class RowEncoder:
    """Encodes rows; loads the tokenizer and the processor of media when a row first needs them.

    Attributes:
        num_conversations: how many rows were messages or instructions.
        rejected: rows that the chat template did not accept, with the reason.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Any],
        vocab_size: int,
        media: Callable[[], MediaEncoder] | None = None,
    ) -> None:
        """Without `media` the model takes text alone."""
        self.tokenizer = functools.cache(tokenizer)
        self.media = None if media is None else functools.cache(media)
        self.num_conversations = 0
        self.rejected: list[str] = []
        self._vocab_size = vocab_size

    def encode(self, rows: Iterable[Row]) -> Iterator[EncodedRow]:
        """Yield each row encoded, without those that the chat template rejects.

        The tokenizer adds its special tokens to `text`. `input_ids` are used unchanged. Blank text
        gives no tokens.

        Raises:
            DataError: a token id is outside the vocabulary, the tokenizer has no chat template for
                a conversation, or a medium cannot be read.

        """
        for row in rows:
            self.num_conversations += row.messages is not None
            encoded: EncodedRow
            if row.media:
                if self.media is None:
                    raise DataError(
                        f"{row.origin}: the row holds {row.media[0].kind}, and the model takes "
                        "text",
                        hint="use other data; --text-column leaves out columns of media",
                    )
                encoded = self.media().encode(row)
                self._check_ids(encoded.ids.tolist(), row)
            elif row.input_ids is not None:
                encoded = row.input_ids
                self._check_ids(encoded, row)
            else:
                try:
                    encoded = self._tokenize(row)
                except RejectedRowError as error:
                    self.rejected.append(f"{row.origin} ({error.__cause__})")
                    continue
                self._check_ids(encoded, row)
            yield encoded

    def _tokenize(self, row: Row) -> list[int]:
        if row.messages is not None and (row.text is None or has_chat_template(self.tokenizer())):
            return render_messages(self.tokenizer(), row.messages, row.origin)
        if row.text is None or not row.text.strip():
            return []
        # verbose=False: text longer than the model's context is cut later, so no warning is due.
        return list(self.tokenizer()(row.text, verbose=False)["input_ids"])

    def _check_ids(self, ids: Sequence[int], row: Row) -> None:
        """Refuse an id without a row in the embedding.

        A tokenizer may have more tokens than the embedding has rows: only those of the text count.
        """
        last = self._vocab_size - 1
        bad = next((index for index, token in enumerate(ids) if not 0 <= token <= last), None)
        if bad is None:
            return
        if row.input_ids is None:
            raise DataError(
                f"{row.origin}: the text gives token {ids[bad]} "
                f"({shorten(self.tokenizer().decode([ids[bad]]))}), "
                f"but the model's embedding has rows 0 to {last}",
                hint="take it out of the text, use the tokenizer published with this model, or "
                "resize the embedding",
            )
        raise DataError(
            f"{row.origin}: input_ids holds {ids[bad]} at position {bad}, "
            f"but the model's vocabulary is 0 to {last}",
            hint="tokenize the data with this model's tokenizer, or give rows with `text`",
        )


def render_messages(tokenizer: Any, messages: Sequence[Message], origin: str) -> list[int]:
    """Render a conversation with the tokenizer's chat template and tokenize the result.

    If the template, the tokenizer or both add a BOS token, the result starts with exactly one.

    Raises:
        DataError: there is no chat template, or it rejects the conversation.

    """

    def holds_all(text: str) -> bool:
        return all(str(message["content"]).strip() in text for message in messages)

    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
        if not holds_all(text):
            # Templates of models that see may read lists of parts alone, and skip a plain text.
            parts = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
            other = str(tokenizer.apply_chat_template(parts, tokenize=False))
            text = other if holds_all(other) else text
    except Exception as error:  # a template is a program that may raise anything
        if not has_chat_template(tokenizer):
            raise DataError(
                f"{origin}: the row is a conversation, but the tokenizer has no chat template",
                hint="use rows with `text`, or a chat model",
            ) from error
        raise RejectedRowError(
            f"{origin}: the chat template rejects the conversation ({error})",
            hint="check the order and names of the roles",
        ) from error
    require_unicode(text, f"{origin}: the rendered chat")
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    num_leading = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    # The tokenizer adds its BOS to a text, but was told not to where the template may write one.
    if num_leading or list(tokenizer("a", verbose=False)["input_ids"])[:1] == [bos]:
        return [bos, *ids[num_leading:]]
    return ids


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Sequences and the rows they came from."""

    sequences: tuple[torch.Tensor, ...]
    """1-D int64, each of at least two tokens."""
    media: dict[int, MediaRow]
    """The sequences that are rows with media, by their index."""
    text: TextHashes
    """Hashes of every used row: of its tokens in sequences, or of its first 32 if that is more."""
    num_rows: int
    """Rows read."""
    num_dropped: int
    """Rows that were too short to use."""
    num_used: int
    """Rows with a token in a sequence."""
    num_cut: int
    """Used rows whose last tokens are in no sequence."""
    first: list[Sequence[int]]
    """The token ids of the first rows used, as far as they are in a sequence."""


def pack_rows(
    rows: Iterable[EncodedRow], *, samples: int, seq_len: int, pack: bool = True
) -> PackedRows:
    """Join rows and cut them into at most `samples` sequences of exactly `seq_len` tokens.

    The last sequence may be shorter, but has at least two tokens. A row with media is a sequence of
    its own; without `pack`, so is every row of two or more tokens, cut to `seq_len`. Rows are read
    only as needed.

    Raises:
        DataError: `seq_len` would cut a medium.
    """
    sequences: list[torch.Tensor] = []
    media: dict[int, MediaRow] = {}
    read: list[EncodedRow] = []
    stream, start, num_rows = array("q"), 0, 0
    for row in rows:
        num_rows += 1
        if isinstance(row, MediaRow):
            media[len(sequences)] = row.cut(seq_len)
            read.append(media[len(sequences)])
            sequences.append(media[len(sequences)].ids)
        elif len(row) >= (1 if pack else MIN_TOKENS):
            read.append(array("q", row))
            stream.extend(row if pack else row[:seq_len])
        while len(sequences) < samples and len(stream) - start >= (seq_len if pack else MIN_TOKENS):
            sequences.append(torch.tensor(stream[start : start + seq_len], dtype=torch.int64))
            start += len(sequences[-1])
        if len(sequences) >= samples:
            break
    if len(sequences) < samples and len(stream) - start >= MIN_TOKENS:
        sequences.append(torch.tensor(stream[start:], dtype=torch.int64))
        start = len(stream)
    hashed: list[Sequence[int]] = []
    first: list[Sequence[int]] = []
    num_cut = 0
    for row in read:
        if isinstance(row, MediaRow):
            num_cut += row.num_cut > 0
            hashed.append(row.text_ids)
            first.append(row.ids.tolist())
            continue
        # `start` counts down to the tokens of later rows that are in a sequence.
        kept = min(len(row), start if pack else seq_len)
        start -= kept
        if kept:
            num_cut += kept < len(row)
            hashed.append(row[: max(kept, TOKENS_PER_HASH)])
            first.append(row[:kept])
    return PackedRows(
        sequences=tuple(sequences),
        media=media,
        text=hash_text(hashed),
        num_rows=num_rows,
        num_dropped=num_rows - len(read),
        num_used=len(hashed),
        num_cut=num_cut,
        first=first[:NUM_SHOWN],
    )
