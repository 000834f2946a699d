"""A plan's model, engines and texts, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.data.sequences import DataPlan, replace_sequences, take_sequences
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.gpus import Gpu, find_gpu
from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import REFERENCE, find_emulated, find_replayed, list_emulated
from fp8calib.errors import UsageError
from fp8calib.jobs.calibration import open_unquantized
from fp8calib.jobs.models import RunModel
from fp8calib.jobs.planning.budget import check_budget
from fp8calib.jobs.recipe_options import open_recipe
from fp8calib.jobs.text import plan_texts
from fp8calib.recipe import Recipe
from fp8calib.requests.plan import PlanRequest
from fp8calib.stats.fingerprint import fingerprint_model
from fp8calib.verification.candidates import Target

_TAG = "fp8calib plan"
SEQUENCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPlan:
    """What a plan is made for."""

    request: PlanRequest
    model: RunModel
    target: Target
    recipe: Recipe
    """Of the calibration."""
    engines: tuple[Engine, ...]
    """All have to load the checkpoint."""
    emulated: Engine
    """The first whose arithmetic is known."""
    numerics: Numerics
    gpu: Gpu | None
    calibration: DataPlan
    search: DataPlan
    """A bounded part of the text that is calibrated on."""
    held_out: DataPlan
    tag: str
    """Runs with the same one measure the same."""

    @property
    def out(self) -> Path:
        """The output folder."""
        default = f"{Path(str(self.request.model)).resolve().name}-plan"
        return Path(self.request.out or default)

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        return self.model.source.folder


@contextmanager
def open_plan(request: PlanRequest) -> Iterator[OpenedPlan]:
    """Open the model and its texts.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model cannot be read or run.
        DataError: the data cannot be read, or is one sequence.
    """
    for engine in _list_engines(request):
        if request.gpu is not None:
            _require_known(find_gpu(request.gpu), engine)
    check_budget(request)
    if request.samples < 2:
        hint = "some are held out from the search: use 2 or more"
        raise UsageError(f"--samples {request.samples}: plan needs two sequences", hint=hint)
    with open_unquantized(request, open_recipe("kv")) as model:
        yield _describe_opened(request, model, *plan_texts(request, model.source))


def _describe_opened(
    request: PlanRequest, model: RunModel, calibration: DataPlan, held_out: DataPlan
) -> OpenedPlan:
    """Describe a plan for a model that is open, with its texts."""
    fingerprint = fingerprint_model(model.source.raw_config, model.checkpoint.stored)
    recipe = open_recipe("kv")
    data = recipe.data.model_copy(update={"batch_size": request.batch_size})
    emulated = _find_emulated(request)
    numerics = emulated.numerics
    assert numerics is not None  # noqa: S101 -- `_find_emulated`
    gpu = None if request.gpu is None else find_gpu(request.gpu)
    if gpu is not None:
        numerics = emulated.emulate_on(gpu, numerics)
    engines = _list_engines(request)
    parts = (fingerprint, calibration.fingerprint, held_out.fingerprint, model.dtype)
    settings = (
        *(emulated.key, request.gpu or "", str(request.batch_size), str(request.stats or "")),
    )
    return OpenedPlan(
        request=request,
        model=model,
        target=Target(
            checkpoint=model.checkpoint,
            fingerprint=fingerprint,
            geometry=model.prepared.geometry,
        ),
        recipe=recipe.model_copy(update={"data": data}),
        engines=engines,
        emulated=emulated,
        numerics=numerics,
        gpu=gpu,
        calibration=calibration,
        search=take_sequences(calibration, 0, SEQUENCES),
        held_out=held_out,
        tag=" ".join([_TAG, *parts, *settings]),
    )


def join_texts(opened: OpenedPlan) -> DataPlan:
    """Join the text of the search with the one that is held out."""
    search, held_out = opened.search, opened.held_out
    first = len(search.sequences)
    media = {**search.media, **{first + index: row for index, row in held_out.media.items()}}
    joined = replace_sequences(search, (*search.sequences, *held_out.sequences), media)
    return replace(joined, warnings=())


def _require_known(gpu: Gpu, engine: Engine) -> None:
    """Refuse a GPU of which nothing is known in an engine.

    Raises:
        UsageError: naming it.
    """
    if not engine.storage:
        raise UsageError(
            f"--gpu {gpu.name}: what {engine.release} serves on it is not known",
            hint="use --engine vllm, or leave out --gpu",
        )


def _list_names(request: PlanRequest) -> list[str]:
    named = [request.engine] if isinstance(request.engine, str) else list(request.engine)
    if not named:
        raise UsageError("--engine: no name given", hint="leave it out to plan for vllm")
    return list(dict.fromkeys(named))


def _list_engines(request: PlanRequest) -> tuple[Engine, ...]:
    found = tuple(map(find_replayed, _list_names(request)))
    for engine in found:
        if engine.replay_folder is None:
            raise UsageError(f"--engine {engine.key}: {engine.no_folder}")
    return found


def _find_emulated(request: PlanRequest) -> Engine:
    known = list_emulated()
    named = (name for name in _list_names(request) if name.partition("==")[0] in known)
    return next((find_emulated(name)[0] for name in named), REFERENCE)
