"""Tasks of lm-evaluation-harness on the unquantized model and on each candidate.

Recovery is candidate / reference in percent, for metrics where higher is better. For others
(perplexities, error rates), and where the harness does not know the direction, it is null: a
percentage would mislead, and both numbers are in the report.
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

from fp8calib.errors import Fp8CalibError, VerificationError
from fp8calib.machine.progress import Progress
from fp8calib.observe.generation_cache import open_cache_hooks
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.report import TaskResult, TaskSetup
from fp8calib.verification.tasks.task_files import Tasks, quiet_harness
from fp8calib.verification.verify import ReferenceModel

SEED = 1234
"""The harness' default; few-shot examples and sampled texts are the same for every candidate."""
BOOTSTRAPS = 1000
"""Resamplings for a standard error without a formula, which give it to 2 %; the harness' default
of 100,000 takes minutes for each metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """The results of the tasks, and how they were run."""

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
    """Run `tasks` on the unquantized model and under each candidate's emulation.

    The tokenizer is changed to put its BOS, if it has one, before every text.

    Raises:
        VerificationError: the harness cannot run a task on this model.
    """
    setup, warnings = _prepare(tokenizer, tasks)
    with quiet_harness(), _one_process():
        harness = _make_harness(reference, tokenizer, setup, batch_size, progress)
        progress.stage("tasks on the reference", None, unit="texts")
        expected = _run_harness(harness, tasks)
        rows: list[TaskResult] = []
        for candidate in candidates:
            progress.stage(f"tasks on {candidate.name}", None, unit="texts")
            emulation = candidate.emulation
            is_plain = not emulation.quantizers and not emulation.weights
            with nullcontext() if is_plain else emulated_model(reference, emulation):
                scores = _run_harness(harness, tasks)
            rows += compare_scores(candidate.name, expected, scores)
            warnings += _list_missing(candidate.name, expected, scores)
    return TaskOutcome(rows=tuple(rows), setup=setup, warnings=tuple(warnings))


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
            f"the tokenizer cannot be made to put its BOS ({tokenizer.bos_token}) before texts: "
            "tasks run without it"
        ]
    return setup, []


def add_bos(tokenizer: Any) -> bool:
    """Make a tokenizer put its BOS before every text; False if it cannot."""
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
        """The harness' own model, which reports its progress."""

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
    """Keep the harness from forking this process, with its model and threads, for bootstraps."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


# --- running ------------------------------------------------------------------------------------


def _run_harness(harness: Any, tasks: Tasks) -> Scores:
    from lm_eval.evaluator import evaluate  # noqa: PLC0415 -- an extra

    try:
        with _seeded(tasks):
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
            hint="run the tasks one by one with `lm-eval` to find the cause, or leave out --tasks",
        ) from error
    return read_scores(results)


@contextmanager
def _seeded(tasks: Tasks) -> Iterator[None]:
    """Seed every random generator; at the end, restore the states."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        for task in tasks.loaded["tasks"].values():
            if task.config.num_fewshot is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


# --- after --------------------------------------------------------------------------------------


def read_scores(results: Mapping[str, Any]) -> dict[tuple[str, str], Score]:
    """Read the scores from the harness' results, whose keys are `metric,filter`.

    A filter other than `none` stays in the metric's name: `exact_match,strict-match`.
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
    """Compare a candidate's scores with the reference's, where both have one."""
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
        yield f"{task}: {metric} is left out, as it is not a number on {side}"


@contextmanager
def emulated_model(reference: ReferenceModel, emulation: Emulation) -> Iterator[None]:
    """Hold the model under `emulation` while the context is open.

    Unlike in `emulated`, callers run the model themselves: their own cache stores the quantized K
    and V, so that both `model(...)` and `model.generate(...)` are emulated.
    """
    model, geometry = reference.model, reference.geometry
    hooks = EmulationHooks(emulation.quantizers, emulation.reads)
    with (
        emulated(model, geometry, emulation, hooks, originals=reference.originals),
        open_cache_hooks(model, geometry, hooks),
    ):
        try:
            yield
        finally:
            hooks.end_batch()
