"""Time the calibration pass, the plain forward and the decoder alone in one process.

python -m scripts.benchmarks.workers.calibration_pass MODEL TOKENS DTYPE DEVICE ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from fp8calib.calibration.calibrate import run_calibration
from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.job import GPU_BATCH_TOKENS, CalibrationJob, RunModel
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.recipe import Recipe, load_recipe
from fp8calib.commands.request import PythonReporter
from fp8calib.data.plan import RowEncoder, build_plan
from fp8calib.data.sequences import DataPlan
from fp8calib.model.load import load_model, open_source
from fp8calib.model.prepared import PreparedModel, prepare
from scripts.benchmarks.workers.timing import load_batches, print_seconds, run_plain


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A loaded model, ready to be calibrated on the benchmark's tokens."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    prepared: PreparedModel
    batches: list[torch.Tensor]
    """As many sequences at once as the calibration runs."""
    sequences: list[torch.Tensor]
    """The same, one by one."""
    plan: DataPlan
    calibrate: Callable[[], RunStats]
    """Runs the calibration pass."""


def main(folder: str, tokens: Path, dtype: str, device: str, rounds: int) -> None:
    """Time recipe `kv` without its weight statistics, which are no part of a forward pass."""
    recipe = load_recipe("kv")
    observe = recipe.observe.model_copy(update={"weights": False})
    recipe = recipe.model_copy(update={"observe": observe})
    with set_up(folder, tokens, dtype, device, recipe) as setup:
        decoder = setup.model.get_decoder()
        runs = {
            "plain": lambda: lambda: run_plain(setup.model, setup.batches),
            "body": lambda: lambda: run_plain(decoder, setup.batches),
            "calibrate": lambda: setup.calibrate,
        }
        print_seconds(runs, rounds=rounds, device=device)


@contextmanager
def set_up(folder: str, tokens: Path, dtype: str, device: str, recipe: Recipe) -> Iterator[Setup]:
    """Load the model and plan exactly the tokens that the plain forward runs."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = open_source(folder)
    model = load_model(source, dtype=getattr(torch, dtype), device=device, device_map=None)
    sequences = load_batches(tokens, device)
    plan = _plan_tokens(tokens, sequences, model)
    chosen = 1 if device == "cpu" else max(1, GPU_BATCH_TOKENS // plan.seq_len)
    size = recipe.data.batch_size or chosen
    with Checkpoint.open(Path(folder)) as checkpoint:
        ready = prepare(model, checkpoint, recipe.observe.ignore)
        loaded = RunModel(
            name=folder,
            source=source,
            checkpoint=checkpoint,
            prepared=ready,
            device=device,
            dtype=dtype,
            dtype_why="",
            is_live=True,
        )

        def calibrate() -> RunStats:
            job = CalibrationJob(
                model=loaded,
                observe=recipe.observe,
                recipe_name=recipe.name,
                plan=plan,
                asked_batch_size=size,
                progress=PythonReporter(None),
            )
            return run_calibration(job)[0]

        yield Setup(
            model=model,
            checkpoint=checkpoint,
            prepared=ready,
            batches=load_batches(tokens, device, size),
            sequences=sequences,
            plan=plan,
            calibrate=calibrate,
        )


def _plan_tokens(tokens: Path, batches: list[torch.Tensor], model: PreTrainedModel) -> DataPlan:
    def no_tokenizer() -> None:
        msg = "the tokens are ids already"
        raise RuntimeError(msg)

    encoder = RowEncoder(no_tokenizer, model.get_input_embeddings().weight.shape[0])
    length = batches[0].shape[1]
    plan = build_plan(encoder, sources=(str(tokens),), samples=len(batches), seq_len=length)
    same = [torch.equal(a, b[0].cpu()) for a, b in zip(plan.sequences, batches, strict=True)]
    if not all(same):
        msg = "the plan has other tokens than the plain forward runs"
        raise RuntimeError(msg)
    return plan


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
