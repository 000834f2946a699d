"""The data plan: every token of a run in order, and how it is cut into batches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from fp8calib.data.media import MODALITIES, Modality
from fp8calib.data.processor import MediaEncoder, MediaRow
from fp8calib.data.rows import Row
from fp8calib.data.rows_used import RowsUsed, summarize_rows
from fp8calib.data.sources import BuiltinPart, iter_rows, mix_rows
from fp8calib.data.specs import DataSpec, FileSource, parse_spec
from fp8calib.data.text_hashes import TextHashes, hash_text
from fp8calib.data.tokenize import NUM_SHOWN, PackedRows, keep_rows, pack_rows, tokenize_rows
from fp8calib.errors import DataError, UsageError, format_count, shorten

FEW_TOKENS = 4096
"""With fewer tokens than this, the plan carries a warning."""
_QUARTERS = 4
MOST_REJECTED = 0.1
"""The share of rows that a chat template may reject before the text is refused."""
IN_MEMORY = "in memory"
"""The source of a plan of rows that no spec names."""


@dataclass(frozen=True, eq=False)
class DataPlan:
    """The sequences of a run and what identifies them."""

    sequences: tuple[torch.Tensor, ...]
    """1-D int64, each of 2 to `seq_len` tokens."""
    packed: bool
    seq_len: int
    fingerprint: str
    """sha256 (hex) over `packed`, `seq_len` and all token ids in order, lengths delimited; and the
    digests of rows with media."""
    text: TextHashes
    """Hashes of the rows that are in a sequence (see `PackedRows.text`)."""
    sources: tuple[str, ...]
    """The specs as given; of a path, only its last component."""
    warnings: tuple[str, ...]
    longest_padded: int | None = None
    """Longer sequences are never padded: only equally long ones share a batch. None: no limit."""
    rows: RowsUsed | None = None
    """The rows of the text; each part of a split plan has the rows of the whole."""
    media: Mapping[int, MediaRow] = field(default_factory=dict)
    """The sequences that are rows with media, by their index; each is a batch of its own."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(map(len, self.sequences))

    @property
    def tokens_by_modality(self) -> dict[Modality, int]:
        """Tokens of all sequences by what they stand for; empty for a plan of text."""
        if not self.media:
            return {}
        counts = [0] * len(MODALITIES)
        for row in self.media.values():
            for code, count in enumerate(row.kinds.bincount(minlength=len(MODALITIES)).tolist()):
                counts[code] += count
        counts[0] += self.num_tokens - sum(counts)
        return {kind: count for kind, count in zip(MODALITIES, counts, strict=True) if count}

    @property
    def lengths(self) -> list[int]:
        """Of each sequence: one more than its tokens that are scored, which are text."""
        return [
            int(_are_scored(self.media[index].kinds).sum()) + 1
            if index in self.media
            else len(sequence)
            for index, sequence in enumerate(self.sequences)
        ]


def _are_scored(kinds: torch.Tensor) -> torch.Tensor:
    """Say of every token but the first whether it is scored: bool [N - 1].

    It is, if it is text: no model predicts what stands for an image.
    """
    return kinds[1:] == 0


@dataclass(frozen=True, eq=False)
class Batch:
    """Neighbouring sequences of one plan, padded on the right with id 0."""

    first: int
    """Global index of the first sequence."""
    input_ids: torch.Tensor
    """int64 [B, L]."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, without padding."""
    quarter: int
    """The quarter of the data that holds the batch, from 0."""
    media: MediaRow | None = None
    """The row with media that is the only sequence; None where all is text."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)

    @property
    def scored(self) -> list[torch.Tensor]:
        """The positions in each sequence whose next token is scored: int64."""
        if self.media is not None:
            return [_are_scored(self.media.kinds).nonzero().flatten()]
        return [torch.arange(length - 1) for length in self.lengths]

    @property
    def scored_lengths(self) -> list[int]:
        """Of each sequence: one more than its tokens that are scored."""
        return [len(index) + 1 for index in self.scored]

    @property
    def mask(self) -> torch.Tensor | None:
        """Bool [B, L], true at tokens and false at padding; None when nothing is padded."""
        width = self.input_ids.shape[1]
        if all(length == width for length in self.lengths):
            return None
        return torch.arange(width)[None, :] < torch.tensor(self.lengths)[:, None]


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
) -> DataPlan:
    """Read the first `samples` sequences of at most `seq_len` tokens.

    `tokenizer` loads the tokenizer, and `encoder` the processor of media; each is called at most
    once, when the first row needs it. Without `encoder` the model takes text alone. Without
    specs, the built-in text is used; `part` selects which part of it. `seed` affects only the
    order of weighted specs. Sequences longer than `longest_padded` are never padded. `rows` are
    read instead of specs. Rows of specs are read from `text_column` if given (see `parse_row`).

    Raises:
        UsageError: a spec is invalid.
        DataError: the data cannot be read, or gives no sequence of two tokens.

    """
    parsed = [parse_spec(text) for text in specs or ("builtin",)] if rows is None else []
    begun: set[int] = set()
    if rows is None:
        _check_columns(parsed, text_column)
        read = [iter_rows(spec, part=part, text_column=text_column) for spec in parsed]
        noted = [_note_begun(each, begun, index) for index, each in enumerate(read)]
        rows = mix_rows([(n, s.weight) for n, s in zip(noted, parsed, strict=True)], seed=seed)
    load = functools.cache(tokenizer)
    encode = None if encoder is None else functools.cache(encoder)
    conversations = 0

    def count_conversations(rows: Iterable[Row]) -> Iterator[Row]:
        nonlocal conversations
        for row in rows:
            conversations += row.messages is not None
            yield row

    rejected: list[str] = []
    encoded = tokenize_rows(
        count_conversations(rows),
        tokenizer=load,
        encoder=encode,
        vocab_size=vocab_size,
        rejected=rejected,
    )
    found = (pack_rows if pack else keep_rows)(encoded, samples=samples, seq_len=seq_len)
    sources = tuple(spec.label for spec in parsed) or (IN_MEMORY,)
    skipped = _describe_rejected(rejected, found.num_rows + len(rejected))
    if rejected and len(rejected) > MOST_REJECTED * (found.num_rows + len(rejected)):
        raise DataError(skipped, hint="check the order and names of the roles")
    if not found.sequences:
        raise DataError(
            f"{', '.join(sources)}: no sequence of two tokens in "
            f"{format_count(found.num_rows, 'row')}",
            hint="use more text" if pack else "use longer rows, or omit --no-pack",
        )
    return DataPlan(
        sequences=found.sequences,
        packed=pack,
        seq_len=seq_len,
        fingerprint=_compute_fingerprint(
            found.sequences, found.media, packed=pack, seq_len=seq_len
        ),
        text=found.text,
        sources=sources,
        warnings=(
            *_list_unread(parsed, begun, samples),
            *([f"{skipped}; they were skipped"] if rejected else ()),
            *_list_warnings(specs, parsed, found, samples=samples),
        ),
        longest_padded=longest_padded,
        rows=summarize_rows(
            found,
            conversations,
            len(rejected),
            load() if load.cache_info().currsize else None,
            encode() if encode is not None and found.media else None,
        ),
        media=found.media,
    )


def split_plan(plan: DataPlan, held_out: float) -> tuple[DataPlan, DataPlan]:
    """Split a plan into two texts; the second has the share `held_out` of the last sequences.

    Raises:
        DataError: there are fewer than two sequences.
    """
    total = len(plan.sequences)
    if total < 2:
        raise DataError(
            f"{', '.join(plan.sources)}: one sequence cannot be split",
            hint="use more text, or a shorter --seq-len",
        )
    count = total - max(1, round(total * held_out))
    return _cut_plan(plan, 0, count), _cut_plan(plan, count, total)


def _cut_plan(plan: DataPlan, start: int, stop: int) -> DataPlan:
    found = take_sequences(plan, start, stop)
    rows = (
        found.media[index].text_ids if index in found.media else sequence.tolist()
        for index, sequence in enumerate(found.sequences)
    )
    return replace(found, text=hash_text(rows))


def take_sequences(plan: DataPlan, start: int, stop: int | None) -> DataPlan:
    """Give a plan of the sequences `start:stop`."""
    media = {index - start: row for index, row in plan.media.items() if index >= start}
    return replace_sequences(plan, plan.sequences[start:stop], media)


def replace_sequences(
    plan: DataPlan, sequences: Sequence[torch.Tensor], media: Mapping[int, MediaRow] | None = None
) -> DataPlan:
    """Give a plan with other sequences; those with media by their index."""
    kept = {index: row for index, row in (media or {}).items() if index < len(sequences)}
    fingerprint = _compute_fingerprint(sequences, kept, packed=plan.packed, seq_len=plan.seq_len)
    return replace(plan, sequences=tuple(sequences), media=kept, fingerprint=fingerprint)


def batches(plan: DataPlan, batch_size: int) -> Iterator[Batch]:
    """Cut a plan into batches of at most `batch_size` neighbouring sequences.

    Sequence i of n belongs to quarter `4 * i // n`; a batch holds sequences of one quarter only.
    Packed sequences of different lengths never share a batch, so packed data is never padded; nor
    are sequences longer than `plan.longest_padded`. A row with media is a batch of its own:
    towers pad images of several rows, and their results then depend on the other rows. The batches
    depend only on the plan and `batch_size`.
    """
    sequences = plan.sequences

    def place(index: int) -> tuple[int, int, int]:
        length, limit = len(sequences[index]), plan.longest_padded
        is_alike = not plan.packed and (limit is None or length <= limit)
        alone = index if index in plan.media else -1
        return _QUARTERS * index // len(sequences), 0 if is_alike else length, alone

    for (quarter, _, alone), found in groupby(range(len(sequences)), place):
        indices = list(found)
        for start in range(0, len(indices), batch_size):
            chosen = [sequences[index] for index in indices[start : start + batch_size]]
            ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
            yield Batch(
                first=indices[start],
                input_ids=ids,
                lengths=tuple(map(len, chosen)),
                quarter=quarter,
                media=plan.media.get(alone),
            )


def find_distinct_tokens(batches: Iterable[Batch]) -> torch.Tensor:
    """Find the token ids of batches, and that of padding: int64, sorted."""
    used = [torch.zeros(1, dtype=torch.int64), *(batch.input_ids.flatten() for batch in batches)]
    distinct: torch.Tensor = torch.unique(torch.cat(used))
    return distinct


def cut_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Take the sequences `start:stop` of a batch (counted within it), with no excess padding.

    The result equals the batch that `batches` would have cut there.
    """
    if stop - start == len(batch.lengths):
        return batch
    lengths = batch.lengths[start:stop]
    return replace(
        batch,
        first=batch.first + start,
        input_ids=batch.input_ids[start:stop, : max(lengths)],
        lengths=lengths,
    )


def _check_columns(parsed: Sequence[DataSpec], text_column: str | None) -> None:
    if text_column is not None and not any(spec.has_columns for spec in parsed):
        raise UsageError(
            f"--text-column {shorten(text_column)}: {parsed[0].label} has no columns",
            hint="name data with columns by --data, or leave --text-column out",
        )


def _compute_fingerprint(
    sequences: Sequence[torch.Tensor],
    media: Mapping[int, MediaRow],
    *,
    packed: bool,
    seq_len: int,
) -> str:
    digest = hashlib.sha256(np.array([packed, seq_len], dtype="<i8").tobytes())
    for sequence in sequences:
        digest.update(np.array([len(sequence)], dtype="<i8").tobytes())
        digest.update(sequence.numpy().astype("<i8").tobytes())
    for index in sorted(media):
        digest.update(f"{index}:{media[index].digest};".encode())
    return digest.hexdigest()


def _describe_rejected(rejected: Sequence[str], num_rows: int) -> str:
    """Say how many rows the chat template rejected, and why the first three."""
    verb = "is" if len(rejected) == 1 else "are"
    more = "; ..." if len(rejected) > NUM_SHOWN else ""
    return (
        f"{len(rejected)} of {format_count(num_rows, 'row')} {verb} rejected by the chat template: "
        f"{'; '.join(rejected[:NUM_SHOWN])}{more}"
    )


def _note_begun(rows: Iterator[Row], begun: set[int], index: int) -> Iterator[Row]:
    """Pass the rows of a source on, and note that one was asked for."""
    begun.add(index)
    yield from rows


def _list_unread(parsed: Sequence[DataSpec], begun: Collection[int], samples: int) -> Iterator[str]:
    """Warn of sources whose rows were not needed."""
    for index, spec in enumerate(parsed):
        if index not in begun:
            yield (
                f"no row of {spec.label} was read: other sources gave all {samples} sequences; "
                "weights (PATH@0.5) or more --samples mix them"
            )


def _list_warnings(
    specs: Sequence[str], parsed: Sequence[DataSpec], found: PackedRows, *, samples: int
) -> Iterator[str]:
    if parsed and not specs:
        yield "no --data given: using the text that ships with Python (builtin)"
    for spec in parsed:
        if isinstance(spec.source, FileSource) and spec.source.ignored:
            yield f"{spec.label}: ignored, not data files: {', '.join(spec.source.ignored)}"
    if found.num_dropped:
        yield f"{found.num_dropped} of {found.num_rows} rows were too short and were skipped"
    if parsed and len(found.sequences) < samples:
        yield f"the data gave {len(found.sequences)} of the {samples} requested sequences"
    yield from warn_of_scales(sum(map(len, found.sequences)))


_FEW_FOR_SCALES = "scales may miss large values"


def warn_of_scales(num_tokens: int) -> Iterator[str]:
    """Warn of a text that is too short to be calibrated on."""
    if num_tokens < FEW_TOKENS:
        yield f"only {num_tokens} tokens, fewer than {FEW_TOKENS}: {_FEW_FOR_SCALES}"


def list_other_warnings(plan: DataPlan) -> Iterator[str]:
    """List the warnings of a text that is not calibrated on."""
    return (text for text in plan.warnings if _FEW_FOR_SCALES not in text)
