"""The text of a run: data specs as on the command line, or rows that are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fp8calib.data.plan import DataPlan, build_plan
from fp8calib.data.rows import Row
from fp8calib.data.sources import BuiltinPart
from fp8calib.errors import UsageError
from fp8calib.model.load import ModelSource, load_tokenizer
from fp8calib.options.keys import DEFAULT_SEQ_LEN


def plan_text(
    source: ModelSource,
    *,
    specs: Sequence[str],
    rows: Iterable[Row] | None = None,
    samples: int,
    seq_len: int | None,
    pack: bool,
    seed: int,
    part: BuiltinPart,
    tokenizer: Any = None,
    text_column: str | None = None,
) -> DataPlan:
    """Build the data plan of a run; without a length, `DEFAULT_SEQ_LEN` or the model's maximum.

    `rows` are read instead of specs. `tokenizer` is used instead of that in the model's folder.

    Raises:
        UsageError: the length is above the model's maximum, or a data spec is invalid.
        DataError: the data cannot be read.
    """
    if tokenizer is not None and not callable(tokenizer):
        raise UsageError(
            f"tokenizer: {type(tokenizer).__name__} is not a tokenizer",
            hint="pass what AutoTokenizer.from_pretrained returns",
        )
    vocab_size = int(source.text_config.vocab_size)
    longest = source.max_positions
    length = seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    if longest is not None and length > longest:
        raise UsageError(
            f"--seq-len {length} is above the model's maximum of {longest} positions",
            hint=f"use --seq-len {longest} or less",
        )
    return build_plan(
        specs,
        tokenizer=lambda: tokenizer or load_tokenizer(source, vocab_size),
        vocab_size=vocab_size,
        samples=samples,
        seq_len=length,
        pack=pack,
        seed=seed,
        part=part,
        longest_padded=source.longest_padded,
        rows=rows,
        text_column=text_column,
    )
