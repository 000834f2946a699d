"""The data plan: every token of a run in order, cut into batches, which processes share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from fp8calib.data.modality import MODALITIES, Modality
from fp8calib.errors import UsageError

if TYPE_CHECKING:  # text needs none of it
    from fp8calib.data.processor import MediaRow

FEW_TOKENS = 4096
"""A text of fewer tokens is warned of."""
_START_TOKENS = 128


Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True)
class RowsUsed:
    """The rows that a run read and used; counted while they are read."""

    read: int = 0
    """Rows after the last one that is needed are not read."""
    total: int | None = None
    """Rows of all files; None if they are not known."""
    is_full: bool = False
    """Whether reading ended because all sequences were full."""
    used: int = 0
    too_short: int = 0
    """Rows without the tokens of a sequence."""
    rejected: int = 0
    """Rows that cannot be read, or whose conversation the chat template does not accept."""
    cut: int = 0
    """Used rows whose last tokens are in no sequence."""
    conversations: int = 0
    """Rows read that are messages or instructions."""
    token_ids: int = 0
    """Rows read that are token ids."""
    chat_template: str | None = None
    """sha256 (hex) of the tokenizer's or processor's chat template if it was applied, else None."""

    def describe(self) -> Iterator[str]:
        """Describe the rows in two lines: their number, and, but for ids, the chat template."""
        beside = (
            (self.too_short, "too short"),
            (self.rejected, "that cannot be used"),
            (self.cut, "cut at the end"),
        )
        notes = "".join(f", {count:,} {what}" for count, what in beside if count)
        of, full = f"of all {self.read:,}", ""
        if self.is_full:
            of = f"of the first {self.read:,}" if self.total is None else f"of {self.total:,}"
            full = "; then all sequences were full"
        yield f"rows: {self.used:,} used {of}{notes}{full}"
        if self.read and self.token_ids == self.read:
            return
        if not self.conversations:
            template = "not applied, as no row is a conversation"
        elif self.chat_template is None:
            template = "the tokenizer has none: instruction and answer are joined as plain text"
        else:
            template = (
                f"the tokenizer's (sha256 {self.chat_template[:12]}), applied to "
                f"{self.conversations:,} of {self.read:,} rows"
            )
        yield f"chat template: {template}"


@dataclass(frozen=True, eq=False)
class DataPlan:
    """The sequences of a run and what identifies them."""

    sequences: tuple[torch.Tensor, ...]
    """1-D int64, each of 2 to `seq_len` tokens."""
    packed: bool
    seq_len: int
    sources: tuple[str, ...]
    """The specs as given, but only the last component of a path."""
    warnings: tuple[str, ...]
    longest_padded: int | None = None
    """Longer sequences are never padded: only equally long ones share a batch. None: no limit."""
    rows: RowsUsed | None = None
    """The rows of the text; each part of a split plan has the rows of the whole."""
    media: Mapping[int, MediaRow] = field(default_factory=dict)
    """The sequences that are rows with media, by their index; each is a batch of its own."""

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 (hex) over `packed`, `seq_len` and all token ids in order, lengths delimited.

        The digests of rows with media follow.
        """
        digest = hashlib.sha256(np.array([self.packed, self.seq_len], dtype="<i8").tobytes())
        for sequence in self.sequences:
            digest.update(np.array([len(sequence)], dtype="<i8").tobytes())
            digest.update(sequence.numpy().astype("<i8").tobytes())
        for index in sorted(self.media):
            digest.update(f"{index}:{self.media[index].digest};".encode())
        return digest.hexdigest()

    @property
    def start(self) -> str:
        """The hash of the first tokens: of the same text, whatever `seq_len` and `samples` are.

        Of a row with media, all of it: its first tokens are those of an image.
        """
        if 0 in self.media:
            return self.media[0].digest[:16]
        head = torch.cat(self.sequences[:_START_TOKENS])[:_START_TOKENS]
        return hashlib.sha256(head.numpy().astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(map(len, self.sequences))

    @property
    def tokens_by_modality(self) -> dict[Modality, int]:
        """Tokens of all sequences by what they stand for; empty for a plan of text."""
        if not self.media:
            return {}
        kinds = torch.cat([row.kinds for row in self.media.values()])
        counts = kinds.bincount(minlength=len(MODALITIES)).tolist()
        counts[0] += self.num_tokens - len(kinds)
        return {kind: count for kind, count in zip(MODALITIES, counts, strict=True) if count}

    @property
    def lengths(self) -> list[int]:
        """Per sequence: number of scored text tokens, plus one."""
        return [len(index) + 1 for batch in batches(self, 1) for index in batch.scored]


@dataclass(frozen=True, eq=False)
class Batch:
    """Neighbouring sequences of one plan, padded on the right with id 0."""

    first: int
    """Global index of the first sequence."""
    input_ids: torch.Tensor
    """int64 [B, L]."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, without padding."""
    media: MediaRow | None = None
    """The row with media that is the only sequence; None if all is text."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)

    @property
    def scored(self) -> list[torch.Tensor]:
        """The positions in each sequence whose next token is scored: int64."""
        if self.media is not None:  # no model predicts what stands for an image
            return [(self.media.kinds[1:] == 0).nonzero().flatten()]
        return [torch.arange(length - 1) for length in self.lengths]

    @property
    def mask(self) -> torch.Tensor | None:
        """Bool [B, L], true at tokens and false at padding; None when nothing is padded."""
        width = self.input_ids.shape[1]
        if all(length == width for length in self.lengths):
            return None
        return torch.arange(width)[None, :] < torch.tensor(self.lengths)[:, None]


def take_sequences(plan: DataPlan, start: int, stop: int | None) -> DataPlan:
    """Give a plan of the sequences `start:stop`."""
    sequences = plan.sequences[start:stop]
    places = range(start, start + len(sequences))
    media = {index - start: row for index, row in plan.media.items() if index in places}
    return replace(plan, sequences=sequences, media=media)


def batches(plan: DataPlan, batch_size: int) -> Iterator[Batch]:
    """Cut a plan into batches of at most `batch_size` neighbouring sequences.

    Packed sequences of different lengths never share a batch, so packed data is never padded; nor
    are sequences longer than `plan.longest_padded`. A row with media is a batch of its own:
    towers pad images of several rows, and their results then depend on the other rows. The batches
    depend only on the plan and `batch_size`.
    """
    sequences, limit = plan.sequences, plan.longest_padded
    places: list[tuple[int, int]] = []
    """What sequences of one batch have in common: the length, or 0; the index of one with media."""
    for index, length in enumerate(map(len, sequences)):
        may_be_padded = not plan.packed and (limit is None or length <= limit)
        places.append((0 if may_be_padded else length, index if index in plan.media else -1))
    for (_, alone), group in groupby(range(len(sequences)), places.__getitem__):
        indices = list(group)
        for start in range(0, len(indices), batch_size):
            chosen = [sequences[index] for index in indices[start : start + batch_size]]
            ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
            yield Batch(
                first=indices[start],
                input_ids=ids,
                lengths=tuple(map(len, chosen)),
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


def cut_into(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into batches of at most `size` sequences, without needless padding."""
    starts = range(0, len(batch.lengths), size)
    return [cut_batch(batch, start, start + size) for start in starts]


# --- shares of whole batches, so that their contents do not depend on who runs them ---------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part `index` (from 1) of `count` neighbouring parts of nearly equal length."""

    index: int = 1
    count: int = 1

    def take(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this part of a list."""
        first, stop = (index * len(items) // self.count for index in (self.index - 1, self.index))
        return items[first:stop]


def parse_share(text: str) -> Share:
    """Parse `I/N`."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--shard {text}: not I/N with I from 1 to N", hint="the second of four is 2/4"
        )
    return Share(index=int(match[1]), count=int(match[2]))


def sequence_ranges(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """List the sequences of each batch as a range of global indices, the stop exclusive."""
    return [(batch.first, batch.first + len(batch.lengths)) for batch in batches]


def drop_finished(batches: Iterable[Batch], done: Collection[tuple[int, int]]) -> list[Batch]:
    """Remove finished sequences from batches; a batch without any is unchanged.

    `done` are ranges of global indices, the stop exclusive.
    """
    left = []
    for batch in batches:
        places = range(batch.first, batch.first + len(batch.lengths))
        are_done = [any(first <= place < stop for first, stop in done) for place in places]
        for is_done, group in groupby(range(len(places)), are_done.__getitem__):
            rows = list(group)
            if not is_done:
                left.append(cut_batch(batch, rows[0], rows[-1] + 1))
    return left
