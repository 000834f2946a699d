"""Tasks of lm-evaluation-harness on the unquantized model and on each candidate.

Recovery is candidate / reference in percent, for metrics of which more is better. Of the others
(perplexities, error rates) and of metrics whose direction the harness does not know it is null:
percent of a number that should be small mislead, and both numbers stand beside each other.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from fp8calib.calibration import Progress
from fp8calib.errors import Fp8CalibError, VerificationError
from fp8calib.observe.generation_cache import open_cache_hooks
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.report import TaskResult, TaskSetup
from fp8calib.verification.tasks.task_files import Tasks, quiet_harness
from fp8calib.verification.verify import ReferenceModel

SEED = 1234
"""The harness' own; few-shot examples and sampled texts are the same for every candidate."""
BOOTSTRAPS = 1000
"""Resamplings behind a standard error without a formula, known to 2 % of itself; the harness'
default of 100,000 takes minutes for each metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """What the tasks gave, and how they were run."""

    rows: tuple[TaskResult, ...]
    setup: TaskSetup
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One metric of one model."""

    value: float
    se: float | None
    is_more_better: bool | None
    """None: the harness does not know."""
    num_documents: int | None


Scores = Mapping[tuple[str, str], Score]
"""By task and metric."""


def run_tasks(
    reference: ReferenceModel,
    candidates: Sequence[Candidate],
    tasks: Tasks,
    tokenizer: Any,
    *,
    batch_size: int,
    progress: Progress,
) -> TaskOutcome:
    """Run `tasks` on the model as it is and under each candidate's emulation.

    Args:
        reference: the unquantized model.
        candidates: what to hold it under.
        tasks: what to ask.
        tokenizer: the model's; it is made to begin every text with its BOS, if it has one.
        batch_size: texts that run side by side.
        progress: told of each text.

    Raises:
        VerificationError: the harness cannot run a task on this model.
    """
    setup, warnings = _prepare(tokenizer, tasks)
    with quiet_harness(), _one_process():
        harness = _make_harness(reference, tokenizer, setup, batch_size, progress)
        progress.stage("tasks on the reference", None, unit="texts")
        expected = _score(harness, tasks)
        rows: list[TaskResult] = []
        for candidate in candidates:
            progress.stage(f"tasks on {candidate.name}", None, unit="texts")
            with _held(reference, candidate.emulation):
                scores = _score(harness, tasks)
            rows += compare_scores(candidate.name, expected, scores)
            warnings += _list_missing(candidate.name, expected, scores)
    return TaskOutcome(rows=tuple(rows), setup=setup, warnings=tuple(warnings))


def _held(reference: ReferenceModel, emulation: Emulation) -> Any:
    is_empty = not emulation.quantizers and not emulation.weights
    return nullcontext() if is_empty else emulated_model(reference, emulation)


# --- before -------------------------------------------------------------------------------------


def _prepare(tokenizer: Any, tasks: Tasks) -> tuple[TaskSetup, list[str]]:
    has_bos = tokenizer.bos_token_id is not None
    adds_bos = has_bos and add_bos(tokenizer)
    setup = TaskSetup(
        harness_version=version("lm-eval"),
        add_bos_token=adds_bos,
        bos_token=tokenizer.bos_token,
        limit=tasks.limit,
    )
    if has_bos and not adds_bos:
        return setup, [
            f"the tokenizer has a BOS ({tokenizer.bos_token}) that it cannot be made to put before "
            "texts: the tasks run without"
        ]
    return setup, []


def add_bos(tokenizer: Any) -> bool:
    """Make a tokenizer put its BOS before every text; False where that cannot be done."""
    if not _begins_with_bos(tokenizer):
        tokenizer.add_bos_token = True
    return _begins_with_bos(tokenizer)


def _begins_with_bos(tokenizer: Any) -> bool:
    return bool(tokenizer.encode("a")[:1] == [tokenizer.bos_token_id])


def _make_harness(
    reference: ReferenceModel,
    tokenizer: Any,
    setup: TaskSetup,
    batch_size: int,
    progress: Progress,
) -> Any:
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415 -- an extra

    class Harness(HFLM):  # type: ignore[misc]  # the harness is untyped
        """The harness' own model, which tells how far it is."""

        def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logits = super()._model_call(inps, *args, **kwargs)
            progress.advance(len(inps))
            return logits

        def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            tokens = super()._model_generate(context, *args, **kwargs)
            progress.advance(len(context))
            return tokens

    return Harness(
        pretrained=reference.model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        add_bos_token=True if setup.add_bos_token else None,
    )


@contextmanager
def _one_process() -> Iterator[None]:
    """Keep the harness from forking this process, model and threads, for its bootstraps."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


# --- running ------------------------------------------------------------------------------------


def _score(harness: Any, tasks: Tasks) -> Scores:
    from lm_eval.evaluator import evaluate  # noqa: PLC0415 -- an extra

    _seed(tasks)
    try:
        results = evaluate(
            lm=harness,
            task_dict=tasks.loaded,
            limit=tasks.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    except Fp8CalibError:
        raise
    except torch.OutOfMemoryError as error:
        raise VerificationError(
            "out of memory in a task", hint="use a smaller --batch-size, or --device cpu"
        ) from error
    except Exception as error:
        raise VerificationError(
            f"lm-evaluation-harness cannot run the tasks on this model: {type(error).__name__}: "
            f"{' '.join(str(error).split())}",
            hint="try one task at a time with `lm-eval`, or leave out --tasks",
        ) from error
    return read_scores(results)


def _seed(tasks: Tasks) -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for task in tasks.loaded["tasks"].values():
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)


# --- after --------------------------------------------------------------------------------------


def read_scores(results: Mapping[str, Any]) -> dict[tuple[str, str], Score]:
    """Read the numbers out of the harness' results, where they stand as `metric,filter`.

    A metric is named with its filter where there is one: `exact_match,strict-match`.
    """
    found = {}
    for task, entries in results["results"].items():
        directions = results["higher_is_better"].get(task) or {}
        for key, value in entries.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            se = entries.get(f"{metric}_stderr,{filtered}")
            found[task, metric if filtered == "none" else key] = Score(
                value=float(value),
                se=float(se) if _is_number(se) else None,
                is_more_better=directions.get(metric),
                num_documents=entries.get("sample_len"),
            )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def compare_scores(candidate: str, reference: Scores, scores: Scores) -> Iterator[TaskResult]:
    """Lay a candidate's scores beside the reference's, where both have one."""
    for (task, metric), base in reference.items():
        score = scores.get((task, metric))
        if score is not None:
            yield TaskResult(
                candidate=candidate,
                task=task,
                metric=metric,
                reference=base.value,
                reference_se=base.se,
                value=score.value,
                value_se=score.se,
                recovery_percent=_compute_recovery(base, score),
                num_documents=base.num_documents,
            )


def _compute_recovery(reference: Score, score: Score) -> float | None:
    if not reference.is_more_better or reference.value <= 0:
        return None
    return 100 * score.value / reference.value


def _list_missing(candidate: str, reference: Scores, scores: Scores) -> Iterator[str]:
    for task, metric in sorted(reference.keys() ^ scores.keys()):
        side = candidate if (task, metric) in reference else "the reference"
        yield f"{task}: {metric} is no number on {side}, and left out"


@contextmanager
def emulated_model(reference: ReferenceModel, emulation: Emulation) -> Iterator[None]:
    """Hold the model under `emulation` while the context is open.

    Its callers need not know: where `emulated` runs batches through the decoder and keeps no
    cache, here the caller's own cache keeps K and V as quantized, so that `model(...)` and
    `model.generate(...)` both go through it.
    """
    model, geometry = reference.model, reference.geometry
    hooks = EmulationHooks(emulation.quantizers)
    with (
        emulated(model, geometry, emulation, hooks, originals=reference.originals),
        open_cache_hooks(model, geometry, hooks),
    ):
        try:
            yield
        finally:
            hooks.end_batch()
