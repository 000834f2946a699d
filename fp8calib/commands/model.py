"""A run: its model, a path or Hub id or one in memory, its text, its plan, its working folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from fp8calib.calibration.decoder import check_runnable
from fp8calib.calibration.job import CalibrationJob, RunModel
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.processes import RankLostError
from fp8calib.checkpoint.checkpoint import Checkpoint, read_quantization
from fp8calib.checkpoint.output import output_folder
from fp8calib.commands.options import DEFAULT_SEQ_LEN, RunOptions
from fp8calib.commands.recipe import Data
from fp8calib.commands.request import Reporter
from fp8calib.commands.result import RunPlan
from fp8calib.data.modality import find_placeholders
from fp8calib.data.plan import RowEncoder, build_plan
from fp8calib.data.rows import ReadRow, has_chat_template
from fp8calib.data.sequences import FEW_TOKENS, DataPlan
from fp8calib.data.sources import BuiltinPart
from fp8calib.errors import ExportError, UsageError
from fp8calib.model.device import DTYPES, choose_device, choose_dtype
from fp8calib.model.load import (
    ModelSource,
    as_unquantized,
    build_skeleton,
    find_longest,
    load_processor,
    load_tokenizer,
    open_source,
)
from fp8calib.model.prepared import prepare

if TYPE_CHECKING:
    from fp8calib.commands.recipe import Recipe
    from fp8calib.data.processor import MediaEncoder

FEW_FOR_SCALES = "scales may miss large values"
"""What it means to calibrate on few tokens."""


@contextmanager
def open_run_model(
    request: RunOptions,
    *,
    recipe: Recipe | None = None,
    can_be_sharded: bool = False,
) -> Iterator[RunModel]:
    """Open a model to run.

    With `can_be_sharded` a model in memory may be sharded by FSDP2.

    While the context is open, a model in memory is in evaluation mode, and the caller's modes of
    torch are off: tensors of inference mode have no versions, by which changes are found; autocast
    and another default dtype would change what is computed.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
                stack.enter_context(torch.autocast(device, enabled=False))
            if isinstance(request.model, str | Path):
                yield from _open_path(request, recipe)
            else:
                for name in ("device", "dtype", "memory"):
                    if getattr(request, name) not in ("auto", None):
                        raise UsageError(
                            f"{name}: the model is in memory already, where and as it is",
                            hint=f"leave {name} out, or pass the path of a checkpoint",
                        )
                yield from _open_live(request.model, recipe, can_be_sharded=can_be_sharded)
    finally:
        torch.set_default_dtype(default)


def _open_path(request: RunOptions, recipe: Recipe | None) -> Iterator[RunModel]:
    device_map = getattr(request, "device_map", None)
    device = choose_device("auto" if device_map else request.device)
    source = open_source(
        str(request.model),
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        needs_weights=not request.dry_run,
    )
    opened = source.stored
    assert opened is not None  # noqa: S101 -- `open_source` opens it
    if not opened.files:  # a plan needs none
        from fp8calib.model.live_model import LiveCheckpoint

        skeleton = build_skeleton(as_unquantized(source))
        opened = LiveCheckpoint(skeleton, skeleton_of=source.folder)
    elif read_quantization(opened) is not None:
        # most models need none of it
        from fp8calib.quantization.sources.decoded import decode_model

        opened = decode_model(opened, if_quantized=request.if_quantized.format(request.model))
    with opened as checkpoint:
        if checkpoint.form or not checkpoint.has_weights:
            source = as_unquantized(source)
        yield prepare_run_model(
            *(source, checkpoint, recipe),
            name=str(request.model),
            device=device,
            dtype=request.dtype,
            memory=request.memory,
            device_map=device_map,
        )


def prepare_run_model(
    source: ModelSource,
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    *,
    device: str,
    dtype: str,
    **more: Any,
) -> RunModel:
    """Describe how the model of an open checkpoint would run, before a weight is read.

    `more` has other fields of the `RunModel`.
    """
    dtype, why = choose_dtype(dtype, device=device, checkpoint=checkpoint)
    ignore = () if recipe is None else recipe.observe.ignore
    prepared = prepare(build_skeleton(source, dtype=DTYPES[dtype]), checkpoint, ignore)
    if recipe is None or recipe.observe.needs_forward:
        check_runnable(prepared.model)
    more |= {"device": device, "dtype": dtype, "dtype_why": why}
    return RunModel(source=source, checkpoint=checkpoint, prepared=prepared, **more)


def _open_live(
    model: PreTrainedModel, recipe: Recipe | None, *, can_be_sharded: bool
) -> Iterator[RunModel]:
    # a model on a path needs none of it
    from fp8calib.model.live_model import LiveCheckpoint, borrowed, check_live_model

    check_live_model(model, can_be_sharded=can_be_sharded)
    with borrowed(model):
        checkpoint = LiveCheckpoint(model)
        check_runnable(model)
        yield RunModel(
            name=str(checkpoint.folder),
            source=ModelSource(
                folder=checkpoint.folder,
                config=model.config,
                raw_config=checkpoint.load_config(),
                trust_remote_code=False,
            ),
            checkpoint=checkpoint,
            prepared=prepare(model, checkpoint, () if recipe is None else recipe.observe.ignore),
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            dtype_why="the model's",
            is_live=True,
        )


def describe_run(model: RunModel, mode: MemoryPlan, text: DataPlan | None, **more: Any) -> RunPlan:
    """Describe a planned run; `more` is added to the plan, or replaces what it has."""
    geometry, rows = model.prepared.geometry, text.rows if text else None
    plan = {
        "model": model.name,
        "architecture": geometry.architecture,
        "layers": len(geometry.layers),
        "weights_size_bytes": model.checkpoint.total_size_bytes,
        "dtype": model.dtype,
        "dtype_why": model.dtype_why,
        "device": model.device,
        "sequences": len(text.sequences) if text else 0,
        "tokens": text.num_tokens if text else 0,
        "data": list(text.sources) if text else [],
        "rows": rows and asdict(rows),
    }
    lines = (*mode.describe(), *(rows.describe() if rows else ()))
    return RunPlan(plan={**plan, **more, **mode.as_json()}, text=lines)


def read_settings(request: object, specs: Sequence[str]) -> Data:
    """Read what a request says of its text."""
    names = [name for name in Data.model_fields if hasattr(request, name)]
    return Data(sources=tuple(specs), **{name: getattr(request, name) for name in names})


def plan_text(
    source: ModelSource,
    data: Data,
    *,
    rows: Iterable[ReadRow] | None = None,
    part: BuiltinPart,
    tokenizer: Any = None,
    few: str = FEW_FOR_SCALES,
) -> DataPlan:
    """Build the data plan of a run; without a length, `DEFAULT_SEQ_LEN` or the model's maximum.

    `rows` are read instead of sources. `tokenizer`, or the one of a processor, is used instead of
    that in the model's folder. `few` is what a text of few tokens is warned with; empty: nothing.
    """
    longest, longest_padded = find_longest(source.config)
    length = data.seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    if longest is not None and length > longest:
        raise UsageError(
            f"--seq-len {length} is above the model's maximum of {longest} positions",
            hint=f"use --seq-len {longest} or less",
        )
    processor: Any = tokenizer if hasattr(tokenizer, "tokenizer") else None
    placeholders = find_placeholders(source.config)

    @cache
    def give_tokenizer() -> Any:
        if tokenizer is None:
            return load_tokenizer(source)
        given = tokenizer if processor is None else processor.tokenizer
        if has_chat_template(given) or not has_chat_template(processor):
            return given
        given = copy(given)
        given.chat_template = processor.chat_template
        return given

    @cache
    def make_encoder() -> MediaEncoder:
        from fp8calib.data.processor import MediaEncoder  # text needs none of it

        loaded = load_processor(source) if processor is None else processor
        return MediaEncoder(loaded, source.config, source.folder.name)

    settings = {**data.model_dump(exclude={"batch_size"}), "seq_len": length}
    encoder = RowEncoder(
        give_tokenizer,
        int(source.config.get_text_config(decoder=True).vocab_size),
        media=make_encoder if placeholders else None,
        placeholders=placeholders,
        longest_padded=longest_padded,
    )
    plan = build_plan(encoder, rows, part=part, **settings)
    return warn_of_few(plan, few) if few else plan


def warn_of_few(plan: DataPlan, few: str = FEW_FOR_SCALES) -> DataPlan:
    """Add a warning to a plan of few tokens, which says what that means."""
    if plan.num_tokens >= FEW_TOKENS:
        return plan
    warning = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: {few}"
    return replace(plan, warnings=(*plan.warnings, warning))


@contextmanager
def work_folder(
    job: CalibrationJob,
    out: Path,
    reporter: Reporter,
    *,
    owned: frozenset[str],
    resume: bool,
    force: bool,
    check_old: Callable[[Path], object] = lambda _folder: None,
) -> Iterator[Journal]:
    """Open the working folder of a run; it becomes the output folder `out` at the end.

    An interruption, a failed peer and a failure to write keep its checkpoints for --resume; any
    other error removes it. Of several processes the first one does all of this; the others write
    their checkpoints to its folder. `check_old` looks at what an interrupted run left.
    """
    group, old = job.group, list[Journal]()
    open_journal = partial(job.open_journal, warn=reporter.warn)

    def read_old(folder: Path) -> None:
        old.append(open_journal(folder))
        old[0].load()
        check_old(folder)

    if not group.is_first:
        folder, sequences = group.broadcast(tuple)
        yield open_journal(folder, sequences=sequences)
        return
    with output_folder(
        out,
        owned=owned,
        tag="fp8calib calibrate",
        resume=resume,
        force=force,
        inputs=[job.model.source.folder],
        on_old=read_old,
        kept_after=(KeyboardInterrupt, RankLostError, ExportError),
    ) as folder:
        journal = old[0] if old else open_journal(folder)
        if journal.has_layers:
            reporter.say("--resume: continuing after the finished layers")
        elif journal.sequences:
            done = sum(stop - first for first, stop in journal.sequences)
            reporter.say(
                f"--resume: {done} of {job.header.num_sequences} sequences are done, continuing "
                "with the rest"
            )
        elif resume:
            reporter.say("--resume: no interrupted run found, starting from the beginning")
        if group.size > 1:
            group.broadcast(lambda: (folder, journal.sequences))
        yield journal
        journal.remove()
