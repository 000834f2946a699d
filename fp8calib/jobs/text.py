"""The text of a run, for one model: data specs as on the command line, or rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8calib.data.plan import build_plan
from fp8calib.data.processor import MediaEncoder, find_placeholders
from fp8calib.data.rows import Row, has_chat_template
from fp8calib.data.sequences import (
    FEW_TOKENS,
    DataPlan,
    list_other_warnings,
    split_plan,
    warn_of_scales,
)
from fp8calib.data.sources import BuiltinPart
from fp8calib.errors import UsageError
from fp8calib.model.load import ModelSource, load_processor, load_tokenizer
from fp8calib.options.recipe_keys import DEFAULT_SEQ_LEN
from fp8calib.recipe import Data
from fp8calib.requests.plan import PlanRequest
from fp8calib.requests.verify import VerifyRequest

HELD_OUT = 0.2
"""The share of the data that the loss is measured on; the scales come from the rest."""


def read_settings(request: VerifyRequest | PlanRequest, specs: Sequence[str]) -> Data:
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


def plan_texts(task: PlanRequest, source: ModelSource) -> tuple[DataPlan, DataPlan]:
    """Plan the text of the calibration and the one that is held out.

    Raises:
        DataError: the data cannot be read, or is one sequence.
    """
    specs = (task.data,) if isinstance(task.data, str | Path) else task.data or ()
    data = read_settings(task, tuple(map(str, specs)))

    def plan(part: BuiltinPart, samples: int) -> DataPlan:
        return plan_text(source, data.model_copy(update={"samples": samples}), part=part)

    if data.sources:
        calibration, held_out = split_plan(plan("calibrate", data.samples), HELD_OUT)
    else:
        number = max(1, round(data.samples * HELD_OUT))
        calibration = plan("calibrate", data.samples - number)
        held_out = plan("verify", number)
    few = warn_of_scales(calibration.num_tokens)
    warnings = (*list_other_warnings(calibration), *few)
    return (
        replace(calibration, warnings=warnings),
        replace(
            held_out,
            warnings=(*list_other_warnings(held_out), *_warn_of_media(calibration, held_out)),
        ),
    )


def _warn_of_media(calibration: DataPlan, held_out: DataPlan) -> Iterator[str]:
    if calibration.media and not held_out.media:
        yield (
            "no row with media is held out: figures are those of text alone, and do not tell "
            "whether scales need media; mix the sources (--data FILE@1), or the rows of a file"
        )


def warn_of_few(tokens: int) -> Iterator[str]:
    """Warn of held-out text that is too short for figures with a small error."""
    if tokens < FEW_TOKENS:
        yield f"only {tokens} tokens are held out, fewer than {FEW_TOKENS}: figures are imprecise"
