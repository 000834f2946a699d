"""Time the calibration pass and two plain ones in one process.

python scripts/bench_pass.py MODEL TOKENS DTYPE DEVICE ROUNDS; prints {name: [seconds]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from bench_timing import load_batches, time_rounds

from fp8calib.calibration import PreparedModel, calibrate, prepare
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.plan import DataPlan, build_plan
from fp8calib.model.load import ModelSource, load_model, open_source
from fp8calib.recipe import Recipe, load_recipe


class Silent:
    """Progress that nobody watches."""

    def stage(self, name: str, total: int | None, *, unit: str = "steps") -> None:
        """Begin a stage."""

    def advance(self, steps: int) -> None:
        """Go on."""


def main(folder: str, tokens: Path, dtype: str, device: str, rounds: int) -> None:
    """Time recipe `kv` without its weight statistics, which are no part of a forward pass."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = open_source(folder, revision=None, trust_remote_code=False, if_quantized="-")
    model = load_model(source, dtype=getattr(torch, dtype), device=device, device_map=None)
    batches = load_batches(tokens, device)
    decoder = model.get_decoder()

    @torch.no_grad()
    def plain() -> None:
        for ids in batches:
            model(ids)

    @torch.no_grad()
    def body() -> None:
        for ids in batches:
            decoder(ids)

    with Checkpoint.open(Path(folder)) as checkpoint:
        recipe = load_recipe("kv")
        recipe = recipe.model_copy(
            update={"observe": recipe.observe.model_copy(update={"weights": False})}
        )
        ready = prepare(model, checkpoint, recipe)
        observe = _calibration(
            ready, plan_tokens(tokens, batches, model), source, checkpoint, recipe
        )
        runs = {"plain": lambda: plain, "body": lambda: body, "calibrate": lambda: observe}
        print(json.dumps(time_rounds(runs, rounds=rounds, device=device)))


def plan_tokens(tokens: Path, batches: list[torch.Tensor], model: torch.nn.Module) -> DataPlan:
    """Plan exactly the tokens that the plain forward runs."""

    def no_tokenizer() -> None:
        msg = "the tokens are ids already"
        raise RuntimeError(msg)

    plan = build_plan(
        [str(tokens)],
        tokenizer=no_tokenizer,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        samples=len(batches),
        seq_len=batches[0].shape[1],
    )
    same = [torch.equal(a, b[0].cpu()) for a, b in zip(plan.sequences, batches, strict=True)]
    if not all(same):
        msg = "the plan holds other tokens than the plain forward runs"
        raise RuntimeError(msg)
    return plan


def _calibration(
    ready: PreparedModel,
    plan: DataPlan,
    source: ModelSource,
    checkpoint: Checkpoint,
    recipe: Recipe,
) -> Callable[[], object]:
    def run() -> object:
        return calibrate(
            ready, plan, source, checkpoint, recipe=recipe, batch_size=1, progress=Silent()
        )

    return run


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
