"""The text of a run, for one model: data specs as on the command line, or rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from fp8calib.commands.options import DEFAULT_SEQ_LEN
from fp8calib.commands.recipe import Data
from fp8calib.data.plan import build_plan
from fp8calib.data.processor import MediaEncoder, find_placeholders
from fp8calib.data.rows import Row, has_chat_template
from fp8calib.data.sequences import (
    DataPlan,
)
from fp8calib.data.sources import BuiltinPart
from fp8calib.errors import UsageError
from fp8calib.model.load import ModelSource, load_processor, load_tokenizer


def read_settings(request: object, specs: Sequence[str]) -> Data:
    """Read what a request says of its text."""
    names = [name for name in Data.model_fields if hasattr(request, name)]
    return Data(sources=tuple(specs), **{name: getattr(request, name) for name in names})


def plan_text(
    source: ModelSource,
    data: Data,
    *,
    rows: Iterable[Row] | None = None,
    part: BuiltinPart,
    tokenizer: Any = None,
) -> DataPlan:
    """Build the data plan of a run; without a length, `DEFAULT_SEQ_LEN` or the model's maximum.

    `rows` are read instead of sources. `tokenizer` is used instead of that in the model's folder.

    Raises:
        UsageError: the length is above the model's maximum, or a data spec is invalid.
        DataError: the data cannot be read.
    """
    if tokenizer is not None and not callable(tokenizer):
        raise UsageError(
            f"tokenizer: {type(tokenizer).__name__} is not a tokenizer",
            hint="pass what AutoTokenizer.from_pretrained or AutoProcessor.from_pretrained returns",
        )
    longest = source.max_positions
    length = data.seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    if longest is not None and length > longest:
        raise UsageError(
            f"--seq-len {length} is above the model's maximum of {longest} positions",
            hint=f"use --seq-len {longest} or less",
        )
    processor: Any = tokenizer if hasattr(tokenizer, "tokenizer") else None
    placeholders = find_placeholders(source.config)

    def give_tokenizer() -> Any:
        if tokenizer is None:
            return load_tokenizer(source)
        given = tokenizer if processor is None else processor.tokenizer
        if has_chat_template(given) or not has_chat_template(processor):
            return given
        given = copy(given)
        given.chat_template = processor.chat_template
        return given

    def make_encoder() -> MediaEncoder:
        loaded = load_processor(source) if processor is None else processor
        return MediaEncoder(loaded, source.config, source.folder.name)

    return build_plan(
        data.sources,
        tokenizer=give_tokenizer,
        encoder=make_encoder if placeholders else None,
        placeholders=placeholders,
        vocab_size=int(source.text_config.vocab_size),
        samples=data.samples,
        seq_len=length,
        pack=data.pack,
        seed=data.seed,
        part=part,
        longest_padded=source.longest_padded,
        rows=rows,
        text_column=data.text_column,
    )
