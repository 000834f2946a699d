"""The way from data specs, or rows in memory, to the sequences of a run."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jinja2 import TemplateSyntaxError

from fp8calib.data.modality import MODALITIES, Modality
from fp8calib.data.rows import Message, ReadRow, Row, has_chat_template, require_unicode
from fp8calib.data.sequences import DataPlan, RowsUsed
from fp8calib.data.sources import BuiltinPart, count_rows, iter_rows, mix_rows
from fp8calib.data.specs import parse_spec
from fp8calib.errors import DataError, format_count, shorten

if TYPE_CHECKING:  # text needs none of it
    from fp8calib.data.processor import MediaEncoder, MediaRow

MOST_UNUSABLE = 0.1
"""The share of rows that may be unusable before the text is refused."""
_CHECKED_AFTER = 100
"""Once so many rows are unusable, their share is checked before more rows are read."""
_IN_MEMORY = "in memory"
"""The source of rows that are given in memory."""
MIN_TOKENS = 2
"""A shorter sequence predicts nothing."""
_NUM_SHOWN = 3
"""At most this many unusable rows are named."""
EncodedRow: TypeAlias = "Sequence[int] | MediaRow"
"""The token ids of a row, or the row with its media."""


def build_plan(
    encoder: RowEncoder,
    rows: Iterable[ReadRow] | None = None,
    *,
    samples: int,
    seq_len: int,
    sources: Sequence[str] = (),
    part: BuiltinPart = "calibrate",
    text_column: str | None = None,
    strict_rows: bool = False,
    pack: bool = True,
    seed: int = 0,
) -> DataPlan:
    """Read at most `samples` sequences of at most `seq_len` tokens, from `rows` or from sources.

    These are data specs; without any, `part` of the built-in text is read. An unusable row is
    skipped, or an error with `strict_rows`. Rows are joined with `pack`, else each is a sequence.
    `seed` affects only the order of weighted specs.
    """
    parsed = [parse_spec(spec) for spec in sources or ("builtin",)] if rows is None else []
    read = [iter_rows(spec, part=part, text_column=text_column) for spec in parsed]
    if rows is None and any(spec.weight for spec in parsed):
        weighted = zip(read, (spec.weight for spec in parsed), strict=True)
        rows = mix_rows(list(weighted), seed=seed)
    sequences, media = pack_rows(
        itertools.chain(*read) if rows is None else rows,
        encoder,
        samples=samples,
        seq_len=seq_len,
        pack=pack,
        strict=strict_rows,
    )
    encoder.require_usable()
    labels = tuple(spec.label for spec in parsed) or (_IN_MEMORY,)
    used = encoder.counts
    if used.is_full and parsed:
        counts = [count_rows(spec, part) for spec in parsed]
        used.total = None if None in counts else sum(filter(None, counts))
    used.chat_template = encoder.hash_template(has_media=bool(media))
    usable = used.read - used.rejected
    if not sequences:
        raise DataError(
            f"{', '.join(labels)}: no sequence of two tokens in {format_count(usable, 'row')}",
            hint="use more text" if pack else "use longer rows, or leave out --no-pack",
        )
    warnings = [
        f"no row of {spec.label} was read: other sources gave all {samples} sequences; use "
        f"{'' if spec.weight else 'weights (PATH@0.5), or '}more --samples"
        for spec, source_rows in zip(parsed, read, strict=True)
        if inspect.getgeneratorstate(source_rows) == inspect.GEN_CREATED
    ]
    warnings += encoder.list_warnings()
    if parsed and not sources:
        warnings.append("no --data given: using the text that ships with Python (builtin)")
    warnings += [
        f"{spec.label}: ignored, not data files: {', '.join(spec.ignored)}"
        for spec in parsed
        if spec.ignored
    ]
    if used.too_short:
        warnings.append(f"{used.too_short} of {usable} rows were too short and were skipped")
    if parsed and len(sequences) < samples:
        warnings.append(
            f"all of the text is used: it fills {len(sequences)} of {samples} sequences (of "
            f"{seq_len} tokens)"
        )
    if encoder.placeholders:
        warnings += _warn_of_media(sequences, media, encoder.placeholders)
    return DataPlan(
        sequences=tuple(sequences),
        packed=pack,
        seq_len=seq_len,
        sources=labels,
        warnings=tuple(warnings),
        longest_padded=encoder.longest_padded,
        rows=used,
        media=media,
    )


def _warn_of_media(
    sequences: Sequence[torch.Tensor],
    media: Mapping[int, MediaRow],
    placeholders: Mapping[int, Modality],
) -> Iterator[str]:
    if not media:
        taken = " and ".join(kind for kind in MODALITIES if kind in placeholders.values())
        yield (
            f"the model takes {taken}, and all rows are text: no scale is set by them; give rows "
            "with media (docs/calibrate.md)"
        )
    tokens = torch.tensor(list(placeholders), dtype=torch.int64)
    texts = [ids for index, ids in enumerate(sequences) if index not in media]
    if count := sum(bool(torch.isin(ids, tokens).any()) for ids in texts):
        yield (
            f"{count} sequences of text hold tokens that stand for media, and no media: is their "
            "column named image, images, audio or audios?"
        )


# --- tokens of rows ------------------------------------------------------------------------------


@dataclass(slots=True)
class RowEncoder:
    """Encodes rows for one model, counts them, and keeps the errors of those that are unusable."""

    tokenizer: Callable[[], Any]
    """Called when a row needs it, as `media`."""
    vocab_size: int
    media: Callable[[], MediaEncoder] | None = None
    """None if the model takes text alone."""
    placeholders: Mapping[int, Modality] = field(default_factory=dict)
    """The ids of the tokens that media fill."""
    longest_padded: int | None = None
    """The maximum length at which sequences are padded into one batch; None means any length."""
    counts: RowsUsed = field(default_factory=RowsUsed)
    """The rows that were read, and what became of them."""
    _unusable: list[DataError] = field(default_factory=list)
    _shortened: list[str] = field(default_factory=list)
    """Origins of the conversations that the chat template does not render whole."""

    def encode(self, row: ReadRow, *, strict: bool) -> EncodedRow | None:
        """Encode a row; None if it cannot be used (an error if `strict`).

        The tokenizer adds its special tokens to `text`. `input_ids` are used as they are. Blank
        text gives no tokens.
        """
        self.counts.read += 1
        encoded = self._encode(row)
        if not isinstance(encoded, DataError):
            return encoded
        if strict:
            raise encoded
        self._unusable.append(encoded)
        self.counts.rejected += 1
        if len(self._unusable) >= _CHECKED_AFTER:
            self.require_usable()
        return None

    def hash_template(self, *, has_media: bool) -> str | None:
        """Give the SHA-256 of the chat template that was applied; None if none was."""
        if not self.counts.conversations:
            return None
        holder: Any = self.media().template if has_media and self.media else self.tokenizer()
        if not has_chat_template(holder):
            return None
        text = holder.chat_template
        if not isinstance(text, str):  # several, by their names
            text = text.get("default") or text["tool_use"]  # as `render_messages` requires
        return hashlib.sha256(text.encode()).hexdigest()

    def require_usable(self) -> None:
        """Refuse the text if more than a tenth of the rows that were read cannot be used.

        One unusable row is accepted, unless it is the only row: it says little about the others.
        """
        count, read = self.counts.rejected, self.counts.read
        if 0 < count == read or count > max(1, MOST_UNUSABLE * read):
            only = self._unusable[0].message if count == read == 1 else self._name_unusable()
            raise DataError(only, hint=self._unusable[0].hint)

    def list_warnings(self) -> Iterator[str]:
        """Warn of unusable rows, and of conversations that are not rendered whole."""
        if self._unusable:
            yield f"skipped: {self._name_unusable()}"
        if self._shortened:
            yield (
                f"the chat template leaves something out of {len(self._shortened)} of "
                f"{format_count(self.counts.conversations, 'conversation')} (first "
                f"{self._shortened[0]}), such as thoughts or tool calls, which then "
                "set no scale; `fp8calib calibrate ... --dry-run --show-text 2` shows what is left"
            )

    def _name_unusable(self) -> str:
        messages = [error.message for error in self._unusable]
        shown = "; ".join(messages[:_NUM_SHOWN]) + "; ..." * (len(messages) > _NUM_SHOWN)
        rows = format_count(self.counts.read, "row")
        return f"{len(messages)} of {rows} cannot be used: {shown}"

    def _encode(self, row: ReadRow) -> EncodedRow | DataError:
        """Encode a row, or say why it cannot be used; one that does not suit the model is refused.

        Those are media that the model does not take, and tokens without an embedding.
        """
        if isinstance(row, DataError):
            return row
        encoded: EncodedRow = []
        if row.media:
            if self.media is None:
                raise DataError(
                    f"{row.origin}: the row holds {row.media[0].kind}, and the model takes text",
                    hint="use other data, or --text-column to leave out columns of media",
                )
            encoded = self.media().encode(row)
        elif row.input_ids is not None:
            encoded = row.input_ids
        elif row.messages is not None and (row.text is None or has_chat_template(self.tokenizer())):
            rendered = render_messages(self.tokenizer(), row.messages, row.origin, tools=row.tools)
            if isinstance(rendered, DataError):
                return rendered
            encoded, is_whole = rendered
            self._shortened += [] if is_whole else [row.origin]
        elif row.text is not None and row.text.strip():
            # verbose=False: text longer than the model's context is cut later, without a warning
            encoded = list(self.tokenizer()(row.text, verbose=False)["input_ids"])
        self.counts.conversations += row.messages is not None
        self.counts.token_ids += row.input_ids is not None
        self._check_ids(encoded if isinstance(encoded, Sequence) else encoded.ids.tolist(), row)
        return encoded

    def _check_ids(self, ids: Sequence[int], row: Row) -> None:
        """Refuse an id without a row in the embedding.

        A tokenizer may have more tokens than that: only those that occur in the text count.
        """
        last = self.vocab_size - 1
        bad = next((index for index, token in enumerate(ids) if not 0 <= token <= last), None)
        if bad is None:
            return
        what = f"input_ids holds {ids[bad]} at position {bad}"
        hint = "tokenize the data with this model's tokenizer, or give rows with `text`"
        if row.input_ids is None:
            token = shorten(self.tokenizer().decode([ids[bad]]))
            what = f"the text gives token {ids[bad]} ({token})"
            hint = "take it out of the text, use the tokenizer published with this model, or "
            hint += "resize the embedding"
        message = f"{row.origin}: {what}, but the model's embedding has rows 0 to {last}"
        raise DataError(message, hint=hint)


def render_messages(
    tokenizer: Any, messages: Sequence[Message], origin: str, *, tools: Sequence[Any] | None = None
) -> tuple[list[int], bool] | DataError:
    """Render a conversation with the tokenizer's chat template and tokenize the result.

    If the template, the tokenizer or both add a BOS token, the result starts with exactly one.

    Returns:
        The token ids, and whether the rendered text holds the content of every message and the
        name of every function that is called; or an error if the template rejects the conversation.
    """
    contents = list(_list_contents(messages))

    def holds_all(text: str) -> bool:
        return all(content in text for content in contents)

    def render(messages: Iterable[Message]) -> str:
        given = None if tools is None else list(tools)
        return str(tokenizer.apply_chat_template(list(messages), tools=given, tokenize=False))

    try:
        text = render(messages)
    except Exception as error:  # a template is a program that may raise anything
        names = getattr(tokenizer, "chat_template", None) or ()
        # of several, transformers chooses one of these two
        default = "tool_use" if tools and "tool_use" in names else "default"
        is_named = isinstance(names, Mapping) and default not in names
        fault, hint = "", "use rows with `text`, or a chat model"
        if not has_chat_template(tokenizer):
            fault = f"{origin}: the row is a conversation, but the tokenizer has no chat template"
        elif isinstance(error, TemplateSyntaxError) or is_named:
            fault = f"the tokenizer's chat template cannot be used: {error}"
            hint = "use rows with `text`, or copy the chat template that the model was published "
            hint += "with"
        if fault:
            raise DataError(fault, hint=hint) from error
        return DataError(
            f"{origin}: the chat template rejects the conversation ({error})",
            hint="check the order and names of the roles",
        )
    if not holds_all(text):
        # Templates of vision models may read only lists of parts, and skip plain text. Other
        # templates leave out thoughts, and fail at lists of parts.
        with contextlib.suppress(Exception):
            other = render(
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            )
            text = other if holds_all(other) else text
    require_unicode(text, f"{origin}: the rendered chat")
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    is_whole = holds_all(text)
    num_leading = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    # The template may write a BOS, so the tokenizer added none above: add it if it does elsewhere.
    if num_leading or list(tokenizer("a", verbose=False)["input_ids"])[:1] == [bos]:
        ids = [bos, *ids[num_leading:]]
    return ids, is_whole


def _list_contents(messages: Sequence[Message]) -> Iterator[str]:
    """List what a rendered conversation should hold: contents, and names of functions called."""
    for message in messages:
        yield str(message["content"]).strip()
        for call in message.get("tool_calls", ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "name" in function:
                yield str(function["name"])


# --- sequences of rows ---------------------------------------------------------------------------


def pack_rows(
    rows: Iterable[ReadRow],
    encoder: RowEncoder,
    *,
    samples: int,
    seq_len: int,
    pack: bool,
    strict: bool,
) -> tuple[list[torch.Tensor], dict[int, MediaRow]]:
    """Join rows and cut them into at most `samples` sequences of exactly `seq_len` tokens.

    The last sequence may be shorter, but has at least two tokens. A row with media is a sequence of
    its own; without `pack`, so is every row of two or more tokens, cut to `seq_len`. Rows are read
    only as needed. The encoder's `counts` tell how many are used, too short or cut.

    Returns:
        The sequences, 1-D int64, and those that are rows with media, by their index.
    """
    counts = encoder.counts
    sequences: list[torch.Tensor] = []
    media: dict[int, MediaRow] = {}
    stream, start = array("q"), 0
    packed: list[int] = []
    """The lengths of the rows in the stream."""
    for read in rows:
        row = encoder.encode(read, strict=strict)
        if row is None:
            continue
        if not isinstance(row, Sequence):  # with media
            kept = row.cut(seq_len)
            media[len(sequences)] = kept
            sequences.append(kept.ids)
            counts.used += 1
            counts.cut += kept.num_cut > 0
        elif len(row) < (1 if pack else MIN_TOKENS):
            counts.too_short += 1
        elif pack:
            packed.append(len(row))
            stream.extend(row)
        else:
            sequences.append(torch.tensor(row[:seq_len], dtype=torch.int64))
            counts.used += 1
            counts.cut += len(row) > seq_len
        while len(sequences) < samples and len(stream) - start >= seq_len:
            sequences.append(torch.tensor(stream[start : start + seq_len], dtype=torch.int64))
            start += seq_len
        if len(sequences) >= samples:
            counts.is_full = True
            break
    if len(sequences) < samples and len(stream) - start >= MIN_TOKENS:
        sequences.append(torch.tensor(stream[start:], dtype=torch.int64))
        start = len(stream)
    left = start  # tokens in sequences that come from this row or a later one
    for length in packed:
        num_kept = min(left, length)
        left -= num_kept
        counts.used += num_kept > 0
        counts.cut += 0 < num_kept < length
    return sequences, media
