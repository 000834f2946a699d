"""Tokenize rows of calibration data, and cut or pack the tokens into sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
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


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Sequences and the rows they came from."""

    sequences: tuple[torch.Tensor, ...]
    """1-D int64, each of at least two tokens."""
    media: Mapping[int, MediaRow]
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
    first: tuple[tuple[int, ...], ...]
    """The token ids of the first rows used, as far as they are in a sequence."""


class RejectedRowError(DataError):
    """The chat template does not accept the conversation of a row."""


EncodedRow = Sequence[int] | MediaRow
"""The token ids of a row, or the row with its media."""


def tokenize_rows(
    rows: Iterable[Row],
    *,
    tokenizer: Callable[[], Any],
    encoder: Callable[[], MediaEncoder] | None = None,
    vocab_size: int,
    rejected: list[str] | None = None,
) -> Iterator[EncodedRow]:
    """Yield each row encoded; `tokenizer` and `encoder` are called only when a row needs one.

    Without `encoder` the model takes text alone.

    The tokenizer adds its special tokens to `text`. `input_ids` are used unchanged. Blank text
    gives no tokens. A conversation that the chat template rejects is left out, and the reason is
    added to `rejected`; without such a list it is an error.

    Raises:
        DataError: a token id is outside the vocabulary, a conversation cannot be rendered, or a
            medium cannot be read.

    """
    for row in rows:
        if row.media:
            if encoder is None:
                raise DataError(
                    f"{row.origin}: the row holds {row.media[0].kind}, and the model takes text",
                    hint="use other data; --text-column leaves out columns of media",
                )
            encoded = encoder().encode(row)
            _check_ids(encoded.ids.tolist(), row, vocab_size, tokenizer)
            yield encoded
            continue
        try:
            ids = _tokenize(row, tokenizer) if row.input_ids is None else row.input_ids
        except RejectedRowError as error:
            if rejected is None:
                raise
            rejected.append(f"{row.origin} ({error.__cause__})")
            continue
        _check_ids(ids, row, vocab_size, tokenizer)
        yield ids


def pack_rows(rows: Iterable[EncodedRow], *, samples: int, seq_len: int) -> PackedRows:
    """Join rows and cut them into at most `samples` sequences of exactly `seq_len` tokens.

    The last sequence may be shorter, but has at least two tokens. A row with media is a sequence of
    its own. Rows are read only as needed.

    Raises:
        DataError: `seq_len` would cut a medium.
    """
    stream, starts, num_rows, num_dropped = array("q"), [], 0, 0
    whole: list[tuple[int, MediaRow]] = []
    num_cut = 0
    for ids in rows:
        num_rows += 1
        if isinstance(ids, MediaRow):
            num_cut += len(ids.ids) > seq_len
            whole.append((len(stream) // seq_len, ids.cut(seq_len)))
        elif ids:
            starts.append(len(stream))
            stream.extend(ids)
        else:
            num_dropped += 1
        if len(stream) // seq_len + len(whole) >= samples:
            break
    packed = _cut(stream, samples=samples - len(whole), seq_len=seq_len)
    num_kept = sum(map(len, packed))
    ranges = [(start, stop) for start, stop in pairwise((*starts, len(stream))) if start < num_kept]
    sequences, media = _insert_rows(packed, whole)
    examples = [tuple(stream[start : min(stop, num_kept)]) for start, stop in ranges[:NUM_SHOWN]]
    return PackedRows(
        sequences=sequences,
        media=media,
        text=hash_text(
            chain(
                (
                    stream[start : max(min(stop, num_kept), min(stop, start + TOKENS_PER_HASH))]
                    for start, stop in ranges
                ),
                (row.text_ids for row in media.values()),
            )
        ),
        num_rows=num_rows,
        num_dropped=num_dropped,
        num_used=len(ranges) + len(media),
        num_cut=sum(stop > num_kept for _, stop in ranges) + num_cut,
        first=tuple([*examples, *(tuple(row.ids.tolist()) for row in media.values())][:NUM_SHOWN]),
    )


def _insert_rows(
    packed: Sequence[torch.Tensor], whole: Sequence[tuple[int, MediaRow]]
) -> tuple[tuple[torch.Tensor, ...], dict[int, MediaRow]]:
    """Put rows with media between packed sequences; each comes after a number of those."""
    sequences: list[torch.Tensor] = []
    media: dict[int, MediaRow] = {}
    waiting = iter(packed)
    taken = 0
    for place, row in whole:
        sequences += islice(waiting, place - taken)
        taken = place
        media[len(sequences)] = row
        sequences.append(row.ids)
    return (*sequences, *waiting), media


def keep_rows(rows: Iterable[EncodedRow], *, samples: int, seq_len: int) -> PackedRows:
    """Turn each of the first `samples` rows of two or more tokens into one sequence.

    A row longer than `seq_len` is truncated.

    Raises:
        DataError: `seq_len` would cut a medium.
    """
    sequences: list[torch.Tensor] = []
    used: list[Sequence[int]] = []
    media: dict[int, MediaRow] = {}
    hashed: list[Sequence[int]] = []
    num_rows = num_cut = 0
    for ids in rows:
        num_rows += 1
        if isinstance(ids, MediaRow):
            num_cut += len(ids.ids) > seq_len
            row = media[len(sequences)] = ids.cut(seq_len)
            sequences.append(row.ids)
            used.append(row.ids.tolist())
            hashed.append(row.text_ids)
        elif len(ids) >= MIN_TOKENS:
            num_cut += len(ids) > seq_len
            sequences.append(torch.tensor(ids[:seq_len], dtype=torch.int64))
            used.append(ids[: max(seq_len, TOKENS_PER_HASH)])
            hashed.append(used[-1])
        if len(sequences) == samples:
            break
    return PackedRows(
        sequences=tuple(sequences),
        media=media,
        text=hash_text(hashed),
        num_rows=num_rows,
        num_dropped=num_rows - len(sequences),
        num_used=len(sequences),
        num_cut=num_cut,
        first=tuple(tuple(ids[:seq_len]) for ids in used[:NUM_SHOWN]),
    )


def render_messages(tokenizer: Any, messages: Sequence[Message], origin: str) -> list[int]:
    """Render a conversation with the tokenizer's chat template and tokenize the result.

    If the template, the tokenizer or both add a BOS token, the result starts with exactly one.

    Raises:
        DataError: there is no chat template, or it rejects the conversation.

    """
    text = require_unicode(_render(tokenizer, messages, origin), f"{origin}: the rendered chat")
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return _with_one_bos(ids, tokenizer)


def _tokenize(row: Row, tokenizer: Callable[[], Any]) -> list[int]:
    if row.messages is not None and (row.text is None or has_chat_template(tokenizer())):
        return render_messages(tokenizer(), row.messages, row.origin)
    if row.text is None or not row.text.strip():
        return []
    # verbose=False: text longer than the model's context is cut later, so no warning is due.
    return list(tokenizer()(row.text, verbose=False)["input_ids"])


def _render(tokenizer: Any, messages: Sequence[Message], origin: str) -> str:
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
        if not _holds_all(text, messages):
            # Templates of models that see may read lists of parts alone, and skip a plain text.
            parts = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
            found = str(tokenizer.apply_chat_template(parts, tokenize=False))
            text = found if _holds_all(found, messages) else text
        return text
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


def _holds_all(text: str, messages: Sequence[Message]) -> bool:
    return all(str(message["content"]).strip() in text for message in messages)


def _with_one_bos(ids: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    num_leading = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[num_leading:]] if num_leading or _adds_bos(tokenizer) else ids


def _adds_bos(tokenizer: Any) -> bool:
    return list(tokenizer("a", verbose=False)["input_ids"])[:1] == [tokenizer.bos_token_id]


def _check_ids(ids: Sequence[int], row: Row, vocab_size: int, tokenizer: Callable[[], Any]) -> None:
    """Refuse an id without a row in the embedding.

    A tokenizer may have more tokens than the embedding has rows: only those of the text count.
    """
    bad = next((index for index, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    if bad is None:
        return
    if row.input_ids is None:
        raise DataError(
            f"{row.origin}: the text gives token {ids[bad]} "
            f"({shorten(tokenizer().decode([ids[bad]]))}), "
            f"but the model's embedding has rows 0 to {vocab_size - 1}",
            hint="take it out of the text, use the tokenizer published with this model, or resize "
            "the embedding",
        )
    raise DataError(
        f"{row.origin}: input_ids holds {ids[bad]} at position {bad}, "
        f"but the model's vocabulary is 0 to {vocab_size - 1}",
        hint="tokenize the data with this model's tokenizer, or give rows with `text`",
    )


def _cut(stream: array[int], *, samples: int, seq_len: int) -> tuple[torch.Tensor, ...]:
    num_tokens = min(len(stream), samples * seq_len)
    pieces = (stream[start : start + seq_len] for start in range(0, num_tokens, seq_len))
    return tuple(
        torch.tensor(piece, dtype=torch.int64) for piece in pieces if len(piece) >= MIN_TOKENS
    )
