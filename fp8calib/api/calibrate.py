"""Calibrate a model, on a path or in memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fp8calib.jobs.arguments import checked
from fp8calib.jobs.calibration import IF_QUANTIZED, plan_recipe_text, run_calibration
from fp8calib.jobs.models import Placement, open_run_model
from fp8calib.jobs.progress import CallbackProgress, ProgressCallback, warn_each
from fp8calib.jobs.recipe_options import override_recipe
from fp8calib.jobs.saved import ModelOrPath
from fp8calib.jobs.stats import CalibrationStats
from fp8calib.jobs.text import TextData


@checked
def calibrate(
    model: ModelOrPath,
    data: TextData | None = None,
    *,
    recipe: str | Path = "kv",
    observe: Collection[str] | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    pack: bool | None = None,
    seed: int | None = None,
    text_column: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    memory: float | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    progress: ProgressCallback | None = None,
) -> CalibrationStats:
    """Run text through a model and return its statistics; nothing is written.

    A model in memory keeps its parameters, hooks, caches and modes. Its statistics belong to the
    checkpoint that `save_pretrained` writes of it.

    Args:
        model: a folder, a Hub id, or a `PreTrainedModel` that is in memory.
        data: a spec as for `--data`, several as paths, texts, or token ids (lists, 1-D tensors or
            arrays); None is the built-in text.
        recipe: what to observe and on which data; the name of a shipped recipe or a YAML file. The
            formats and the checkpoint that it names are not written.
        observe: the kinds of sites to observe, of `kv`, `query`, `inputs` and `weights`; None
            leaves it to the recipe (`kv` observes all, so that any format can follow).
        samples: how many sequences; None leaves it to the recipe, as for the following options.
        seq_len: tokens of a sequence.
        batch_size: sequences of a forward pass.
        pack: whether rows are joined and cut into sequences.
        seed: of the mixing of weighted specs.
        text_column: the column of the rows of `data` to read: text, messages or token ids.
        device: `auto`, `cpu`, `cuda` or `cuda:i`; for a path only, like the next three.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device_map: `auto` spreads the model over all GPUs.
        memory: the most memory of the process, in GiB.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the Python code of the checkpoint.
        tokenizer: for texts; None takes the one in the model's folder.
        progress: called with stage, steps done and all steps.

    Raises:
        UsageError: an option is invalid.
        RecipeError: the recipe is invalid.
        ModelError: the model cannot be read or run, or is quantized in a form that cannot be read.
        DataError: the data cannot be read.
        CalibrationError: the forward pass failed, or gave NaN or infinity.
    """
    asked = override_recipe(
        str(recipe),
        data={
            "samples": samples,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "pack": pack,
            "seed": seed,
            "text_column": text_column,
        },
        scales={},
        top={},
        observe=observe,
    )
    placement = Placement(device=device, dtype=dtype, device_map=device_map, memory=memory)
    reports = CallbackProgress(progress)
    with open_run_model(
        model,
        placement,
        revision=revision,
        trust_remote_code=trust_remote_code,
        if_quantized=IF_QUANTIZED,
        recipe=asked,
    ) as found:
        plan = plan_recipe_text(found, asked, data, tokenizer=tokenizer)
        warn_each([*found.describe_decoded(), *(plan.warnings if plan else ())])
        return run_calibration(found, asked, plan, reports)
