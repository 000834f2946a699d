"""Time calibration on rows with images and the model's own forward pass in one process.

python -m scripts.benchmarks.workers.media_pass MODEL ROWS SAMPLES DTYPE DEVICE ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from fp8calib.calibration import calibrate
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import DataPlan
from fp8calib.jobs.reporter import CallbackProgress
from fp8calib.jobs.text import plan_text
from fp8calib.model.load import load_model, load_processor, open_source
from fp8calib.model.prepared import prepare
from fp8calib.recipe import Data, load_recipe
from scripts.benchmarks.workers.timing import print_seconds

Inputs = Mapping[str, torch.Tensor]


def main(folder: str, rows: str, samples: int, dtype: str, device: str, rounds: int) -> None:
    """Time recipe `kv` without its weight statistics, with the processor and without it."""
    transformers.logging.set_verbosity_error()
    recipe = load_recipe("kv")
    observe = recipe.observe.model_copy(update={"weights": False})
    recipe = recipe.model_copy(update={"observe": observe})
    source = open_source(folder)
    model = load_model(source, dtype=getattr(torch, dtype), device=device, device_map=None)
    data = Data(sources=(rows,), samples=samples)
    plan = partial(plan_text, source, data, part="calibrate", tokenizer=load_processor(source))
    processed = _process(plan())
    with Checkpoint.open(Path(folder)) as checkpoint:
        ready = prepare(model, checkpoint, recipe)

        def run(plan: DataPlan) -> object:
            progress = CallbackProgress(None)
            return calibrate(ready, plan, source, checkpoint, recipe=recipe, progress=progress)

        planned = plan()
        kept = _keep_processed(planned, processed)
        runs: dict[str, Callable[[], object]] = {
            "plain": lambda: _run_model(model, processed),
            "body": lambda: _run_model(model.model, processed),
            "calibrate": lambda: run(kept),
            "processing, plain": lambda: _run_model(model, _process(planned)),
            "processing, calibrate": lambda: run(planned),
            "planning, calibrate": lambda: run(plan()),
        }
        timed = {name: partial(_return, each) for name, each in runs.items()}
        print_seconds(timed, rounds=rounds, device=device)


def _return(run: Callable[[], object]) -> Callable[[], object]:
    return run


def _process(plan: DataPlan) -> list[Inputs]:
    """Give the inputs of the model for each row."""
    return [
        {"input_ids": row.ids.unsqueeze(0), **row.load()}
        for row in (plan.media[index] for index in range(len(plan.sequences)))
    ]


def _keep_processed(plan: DataPlan, processed: list[Inputs]) -> DataPlan:
    """Give a plan whose rows are processed already."""
    media = {
        index: replace(row, load=partial(_without_ids, processed[index]))
        for index, row in plan.media.items()
    }
    return replace(plan, media=media)


def _without_ids(inputs: Inputs) -> Inputs:
    return {name: tensor for name, tensor in inputs.items() if name != "input_ids"}


@torch.no_grad()
def _run_model(model: Any, rows: list[Inputs]) -> None:
    for row in rows:
        model(
            **{
                name: tensor.to(
                    model.device, model.dtype if tensor.is_floating_point() else tensor.dtype
                )
                for name, tensor in row.items()
            }
        )


if __name__ == "__main__":
    model, rows, samples, dtype, device, rounds = sys.argv[1:]
    main(model, rows, int(samples), dtype, device, int(rounds))
