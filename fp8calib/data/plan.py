"""The way from data specs, or rows in memory, to the sequences of a run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fp8calib.data.media import MODALITIES, Modality
from fp8calib.data.processor import MediaEncoder
from fp8calib.data.rows import Row, has_chat_template
from fp8calib.data.sequences import DataPlan, RowsUsed, compute_fingerprint, warn_of_scales
from fp8calib.data.sources import BuiltinPart, iter_rows, mix_rows
from fp8calib.data.specs import BuiltinSource, DataSpec, FileSource, parse_spec
from fp8calib.data.tokenize import NUM_SHOWN, PackedRows, RowEncoder, pack_rows
from fp8calib.errors import DataError, UsageError, fit_line, format_count, shorten

MOST_REJECTED = 0.1
"""The share of rows that a chat template may reject before the text is refused."""
IN_MEMORY = "in memory"
"""The source of a plan of rows that no spec names."""
_HEAD_TOKENS, _TAIL_TOKENS = 40, 12
_HEAD_CHARS, _TAIL_CHARS = 100, 30


def build_plan(
    specs: Sequence[str],
    *,
    tokenizer: Callable[[], Any],
    vocab_size: int,
    samples: int,
    seq_len: int,
    pack: bool = True,
    seed: int = 0,
    part: BuiltinPart = "calibrate",
    longest_padded: int | None = None,
    rows: Iterable[Row] | None = None,
    text_column: str | None = None,
    encoder: Callable[[], MediaEncoder] | None = None,
    placeholders: Mapping[int, Modality] | None = None,
) -> DataPlan:
    """Read the first `samples` sequences of at most `seq_len` tokens, of specs or of `rows`.

    `tokenizer` and `encoder` are called at most once, when the first row needs them. Without
    `encoder` the model takes text alone; `placeholders` are the ids of the tokens that media fill.
    Without specs, `part` of the built-in text is used. `seed` affects only the order of weighted
    specs.

    Raises:
        UsageError: a spec is invalid.
        DataError: the data cannot be read, or gives no sequence of two tokens.

    """
    parsed = [parse_spec(text) for text in specs or ("builtin",)] if rows is None else []
    read = [iter_rows(spec, part=part, text_column=text_column) for spec in parsed]
    if text_column is not None and parsed and not any(map(_has_columns, parsed)):
        raise UsageError(
            f"--text-column {shorten(text_column)}: {parsed[0].label} has no columns",
            hint="name data with columns by --data, or leave --text-column out",
        )
    if rows is None:
        weights = [spec.weight for spec in parsed]
        rows = mix_rows(list(zip(read, weights, strict=True)), seed=seed)
    encoding = RowEncoder(tokenizer, vocab_size, encoder)
    packed = pack_rows(encoding.encode(rows), samples=samples, seq_len=seq_len, pack=pack)
    sources = tuple(spec.label for spec in parsed) or (IN_MEMORY,)
    used = _summarize_rows(packed, encoding)
    rejected = _describe_rejected(encoding.rejected, used.read)
    if used.rejected > MOST_REJECTED * used.read:
        raise DataError(rejected, hint="check the order and names of the roles")
    if not packed.sequences:
        raise DataError(
            f"{', '.join(sources)}: no sequence of two tokens in "
            f"{format_count(packed.num_rows, 'row')}",
            hint="use more text" if pack else "use longer rows, or omit --no-pack",
        )
    warnings = [
        f"no row of {spec.label} was read: other sources gave all {samples} sequences; "
        "weights (PATH@0.5) or more --samples mix them"
        for spec, source_rows in zip(parsed, read, strict=True)
        if inspect.getgeneratorstate(source_rows) == inspect.GEN_CREATED
    ]
    if used.rejected:
        warnings.append(f"{rejected}; they were skipped")
    if parsed and not specs:
        warnings.append("no --data given: using the text that ships with Python (builtin)")
    warnings += [
        f"{spec.label}: ignored, not data files: {', '.join(spec.source.ignored)}"
        for spec in parsed
        if isinstance(spec.source, FileSource) and spec.source.ignored
    ]
    warnings += _list_warnings(packed, samples if parsed else 0, placeholders or {})
    return DataPlan(
        sequences=packed.sequences,
        packed=pack,
        seq_len=seq_len,
        fingerprint=compute_fingerprint(
            packed.sequences, packed.media, packed=pack, seq_len=seq_len
        ),
        text=packed.text,
        sources=sources,
        warnings=tuple(warnings),
        longest_padded=longest_padded,
        rows=used,
        media=packed.media,
    )


def _has_columns(spec: DataSpec) -> bool:
    if isinstance(spec.source, FileSource):
        return any(path.suffix.lower() != ".txt" for path in spec.source.paths)
    return not isinstance(spec.source, BuiltinSource)


def _describe_rejected(rejected: Sequence[str], num_rows: int) -> str:
    """Say how many rows the chat template rejected, and why the first three."""
    verb = "is" if len(rejected) == 1 else "are"
    more = "; ..." if len(rejected) > NUM_SHOWN else ""
    return (
        f"{len(rejected)} of {format_count(num_rows, 'row')} {verb} rejected by the chat template: "
        f"{'; '.join(rejected[:NUM_SHOWN])}{more}"
    )


def _list_warnings(
    packed: PackedRows, samples: int, placeholders: Mapping[int, Modality]
) -> Iterator[str]:
    if packed.num_dropped:
        yield f"{packed.num_dropped} of {packed.num_rows} rows were too short and were skipped"
    if len(packed.sequences) < samples:
        yield f"the data gave {len(packed.sequences)} of the {samples} requested sequences"
    yield from warn_of_scales(sum(map(len, packed.sequences)))
    if not placeholders:
        return
    if not packed.media:
        taken = " and ".join(kind for kind in MODALITIES if kind in placeholders.values())
        yield (
            f"the model takes {taken}, and all rows are text: no scale is set by them; give rows "
            "with media (docs/media.md)"
        )
    tokens = torch.tensor(list(placeholders))
    count = sum(
        bool(torch.isin(ids, tokens).any())
        for index, ids in enumerate(packed.sequences)
        if index not in packed.media
    )
    if count:
        yield (
            f"{count} sequences of text hold tokens that stand for media, and no media: is their "
            "column named image, images, audio or audios?"
        )


def _summarize_rows(packed: PackedRows, encoding: RowEncoder) -> RowsUsed:
    """Summarize rows; if none needed the tokenizer, examples are token ids."""
    was_loaded = encoding.tokenizer.cache_info().currsize
    tokenizer: Any = encoding.tokenizer() if was_loaded else None
    template = tokenizer
    if packed.media and encoding.media is not None:
        tokenizer = tokenizer or encoding.media().tokenizer
        template = encoding.media().template
    digest = None
    if encoding.num_conversations and has_chat_template(template):
        text = template.chat_template
        if not isinstance(text, str):  # several, by their names
            text = template.get_chat_template()
        digest = hashlib.sha256(text.encode()).hexdigest()
    return RowsUsed(
        read=packed.num_rows + len(encoding.rejected),
        used=packed.num_used,
        too_short=packed.num_dropped,
        rejected=len(encoding.rejected),
        cut=packed.num_cut,
        conversations=encoding.num_conversations,
        chat_template=digest,
        examples=tuple(_shorten_row(ids, tokenizer) for ids in packed.first),
    )


def _shorten_row(ids: Sequence[int], tokenizer: Any) -> str:
    """Show the first and the last tokens of a row, and of these the first and last characters."""
    tail = ""
    if len(ids) > _HEAD_TOKENS + _TAIL_TOKENS:
        tail = _show_tokens(ids[-_TAIL_TOKENS:], tokenizer)
        ids = ids[:_HEAD_TOKENS]
    head = _show_tokens(ids, tokenizer)
    if not tail and len(head) <= _HEAD_CHARS + _TAIL_CHARS:
        return head
    return f"{head[:_HEAD_CHARS]} ... {(tail or head)[-_TAIL_CHARS:]}"


def _show_tokens(ids: Sequence[int], tokenizer: Any) -> str:
    decode = getattr(tokenizer, "decode", None)
    if decode is None:
        return f"token ids {' '.join(map(str, ids))}"
    return fit_line(decode(list(ids), skip_special_tokens=False))
