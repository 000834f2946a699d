"""Write an FP8 checkpoint of a model, on a path or in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8calib.dialects.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.fp8.schemes import GPTQ, NEAREST
from fp8calib.jobs.arguments import checked
from fp8calib.jobs.progress import CallbackProgress, ProgressCallback, warn_each
from fp8calib.jobs.quantization.planned import (
    check_rounding,
    open_planned,
    resolve_plan,
    write_planned,
)
from fp8calib.jobs.quantization.report import build_quantization_report
from fp8calib.jobs.recipe_options import make_data_options
from fp8calib.jobs.saved import ModelOrPath, saved_model, warn_of_tokenizer
from fp8calib.jobs.text import TextData
from fp8calib.stats.calibration_stats import CalibrationStats, load_stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """An FP8 checkpoint that was written."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`."""
    report: Mapping[str, Any] = field(repr=False)
    """What `quantize --json` prints: the linears that stay unquantized, who serves it, notes."""


@checked
def quantize(
    model: ModelOrPath,
    scheme: str,
    out: str | Path,
    *,
    rounding: str = NEAREST,
    data: TextData | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    pack: bool = True,
    text_column: str | None = None,
    stats: str | Path | CalibrationStats | None = None,
    dialect: str = COMPRESSED_TENSORS.name,
    layer_schemes: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    power_of_two_scales: bool | None = None,
    shared_scales: bool = True,
    allow_unservable: bool = False,
    dequantize: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    memory: float | None = None,
    resume: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    tokenizer: Any = None,
    progress: ProgressCallback | None = None,
) -> Quantized:
    """Write an FP8 checkpoint shard by shard.

    Weights are rounded to nearest, and no model runs; or by GPTQ, which runs text through the model
    layer by layer.

    Args:
        model: a folder, a Hub id, or a `PreTrainedModel`, which is written to a temporary folder
            beside `out` first.
        scheme: such as `fp8-dynamic`.
        out: the folder of the checkpoint.
        rounding: `nearest` or `gptq`.
        data: for `gptq`, as for `calibrate`; None is the built-in text.
        samples: for `gptq`, how many sequences; None is 512.
        seq_len: for `gptq`, tokens of a sequence; None is 2048, or the model's maximum.
        batch_size: for `gptq`, sequences of a forward pass; None is 1.
        pack: for `gptq`, whether rows are joined and cut into sequences.
        text_column: for `gptq`, as for `calibrate`.
        stats: statistics for the scales of inputs, K and V, or their path.
        dialect: the form of the checkpoint (`--format`).
        layer_schemes: other schemes of some linears, by patterns like those of `ignore`; the first
            pattern that matches counts.
        ignore: patterns of modules that stay unquantized.
        power_of_two_scales: with `fp8-block`, round weight scales up to powers of two; if None,
            with `gptq`.
        shared_scales: whether fused weights share a per-tensor scale.
        allow_unservable: write it even if no engine can load it.
        dequantize: accept a model with FP8 weights.
        device: where to compute; `auto` is the CPU, and with `gptq` a GPU if there is one.
        dtype: for `gptq`, of the forward pass.
        memory: for `gptq`, the most memory of the process, in GiB.
        resume: continue an interrupted run.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: for `gptq`, run the Python code of the checkpoint.
        force: replace earlier output.
        tokenizer: written beside a model that is in memory, and used for texts.
        progress: called with stage, steps or bytes done, and all of them.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read, is quantized already, or holds NaN.
        DataError: the data cannot be read.
        CalibrationError: a forward pass of `gptq` failed, or gave NaN or infinity.
        ExportError: the statistics do not fit, or no engine can load the checkpoint.
    """
    of_text = {
        "data": data,
        "samples": samples,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "no_pack": not pack,
        "text_column": text_column,
        "dtype": None if dtype == "auto" else dtype,
        "memory": memory,
        "trust_remote_code": trust_remote_code,
    }
    check_rounding(rounding, of_text, dequantize=dequantize)
    asked = resolve_plan(
        scheme,
        dialect,
        layer_schemes=layer_schemes or {},
        ignore=ignore,
        power_of_two_scales=power_of_two_scales,
        shared_scales=shared_scales,
        is_calibrated=stats is not None or rounding == GPTQ,
        rounding=rounding,
    )
    started = time.monotonic()
    out, reports = Path(out), CallbackProgress(progress)
    inputs = [Path(stats)] if isinstance(stats, str | Path) else []
    loaded = load_stats(Path(stats)) if isinstance(stats, str | Path) else stats
    with saved_model(model, out, tokenizer) as place:
        if rounding == GPTQ:
            from fp8calib.jobs.models import Placement  # noqa: PLC0415 -- imports transformers
            from fp8calib.jobs.quantization.gptq import (  # noqa: PLC0415 -- imports transformers
                GptqTask,
                open_gptq,
                run_gptq,
            )

            task = GptqTask(
                model=place,
                out=out,
                asked=asked,
                stats=loaded,
                inputs=inputs,
                data=make_data_options(
                    samples=samples,
                    seq_len=seq_len,
                    batch_size=batch_size,
                    pack=pack,
                    text_column=text_column,
                ),
                rows=data,
                tokenizer=tokenizer,
                placement=Placement(device=device, dtype=dtype, memory=memory),
                revision=revision,
                trust_remote_code=trust_remote_code,
                allow_unservable=allow_unservable,
                resume=resume,
                force=force,
                say=lambda _text: None,
                warn=lambda text: warn_each([text]),
            )
            with open_gptq(task) as opened:
                outcome = run_gptq(opened, reports)
            assert outcome is not None  # noqa: S101 -- there is one process
        else:
            with open_planned(
                place,
                asked,
                loaded,
                revision=revision,
                dequantize=dequantize,
                allow_unservable=allow_unservable,
            ) as planned:
                warn_each([planned.unchecked] if planned.unchecked else [])
                written = write_planned(
                    planned,
                    out,
                    device=device,
                    resume=resume,
                    force=force,
                    inputs=inputs,
                    progress=reports,
                )
                outcome = planned.finish(written, out, started=started, stats=loaded)
        report = build_quantization_report(outcome)
    warn_each(warn_of_tokenizer(model, tokenizer, outcome.written.files))
    return Quantized(out=out, files=outcome.written.files, report=report)
