"""The text of a run: data specs as on the command line, or rows that are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fp8calib.data.processor import MediaEncoder, find_placeholders, list_modalities
from fp8calib.data.rows import Row, has_chat_template
from fp8calib.data.sequences import (
    FEW_TOKENS,
    DataPlan,
    build_plan,
    list_other_warnings,
    split_plan,
    warn_of_scales,
)
from fp8calib.data.sources import BuiltinPart
from fp8calib.errors import UsageError
from fp8calib.jobs.rows import list_specs
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
    vocab_size = int(source.text_config.vocab_size)
    longest = source.max_positions
    length = data.seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    if longest is not None and length > longest:
        raise UsageError(
            f"--seq-len {length} is above the model's maximum of {longest} positions",
            hint=f"use --seq-len {longest} or less",
        )
    processor = tokenizer if hasattr(tokenizer, "tokenizer") else None
    modalities = list_modalities(source.config)
    plan = build_plan(
        data.sources,
        tokenizer=lambda: (
            load_tokenizer(source)
            if tokenizer is None
            else _give_template(getattr(processor, "tokenizer", tokenizer), processor)
        ),
        encoder=partial(_make_encoder, source, processor) if modalities else None,
        vocab_size=vocab_size,
        samples=data.samples,
        seq_len=length,
        pack=data.pack,
        seed=data.seed,
        part=part,
        longest_padded=source.longest_padded,
        rows=rows,
        text_column=data.text_column,
    )
    if modalities and not plan.media:
        taken = " and ".join(modalities)
        note = (
            f"the model takes {taken}, and all rows are text: no scale is set by them; give rows "
            "with media (docs/media.md)"
        )
        plan = replace(plan, warnings=(*plan.warnings, note))
    if modalities and (count := _count_places(plan, source)):
        note = (
            f"{count} sequences of text hold tokens that stand for media, and no media: is their "
            "column named image, images, audio or audios?"
        )
        plan = replace(plan, warnings=(*plan.warnings, note))
    return plan


def _give_template(tokenizer: Any, processor: Any) -> Any:
    """Give a copy of a tokenizer without a chat template that of its processor."""
    if has_chat_template(tokenizer) or not has_chat_template(processor):
        return tokenizer
    found = copy(tokenizer)
    found.chat_template = processor.chat_template
    return found


def _count_places(plan: DataPlan, source: ModelSource) -> int:
    """Count the sequences of text alone with a token that a medium would fill."""
    tokens = torch.tensor(list(find_placeholders(source.config)))
    return sum(
        bool(torch.isin(ids, tokens).any())
        for index, ids in enumerate(plan.sequences)
        if index not in plan.media
    )


def _make_encoder(source: ModelSource, processor: Any) -> MediaEncoder:
    found = load_processor(source) if processor is None else processor
    return MediaEncoder(found, source.config, source.folder.name)


def plan_texts(task: PlanRequest, source: ModelSource) -> tuple[DataPlan, DataPlan]:
    """Plan the text of the calibration and the one that is held out.

    Raises:
        DataError: the data cannot be read, or is one sequence.
    """
    data = read_settings(task, list_specs(task.data))

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
