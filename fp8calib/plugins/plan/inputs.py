"""A plan's model, engines and texts, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.calibration.fingerprint import fingerprint_model
from fp8calib.calibration.job import RunModel
from fp8calib.commands.model import open_run_model, plan_text, read_settings, warn_of_few
from fp8calib.commands.recipe import Recipe, load_recipe
from fp8calib.data.sequences import DataPlan, take_sequences
from fp8calib.data.sources import BuiltinPart
from fp8calib.engines.engine import Engine
from fp8calib.engines.gpus import find_gpu, knows_gpus, list_unmultiplied
from fp8calib.engines.registry import REFERENCE, find_emulated, find_replayed, list_emulated
from fp8calib.errors import DataError, ModelError, UsageError
from fp8calib.model.load import ModelSource
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.plugins.plan.request import NO_SCHEME, PlanRequest, read_size
from fp8calib.verification.candidates import Target
from fp8calib.verification.report import CandidateResult
from fp8calib.verification.summary import bounded_exp

_SEARCHED = 8
"""Sequences of the search: every layer costs a forward pass over them."""
_NO_MEDIA = (
    "no row with media is held out: figures are those of text alone, and do not tell whether "
    "scales need media; mix the sources (--data FILE@1), or the rows of a file"
)
_HELD_OUT = 0.2
"""The share of the data that the plan is judged on; scales and the search have the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What limits the plan."""

    name: str
    """In words."""
    kind: str
    """`bytes`, `kld` or `ratio`."""
    limit: float

    def read_most(self, summary: CandidateResult) -> float:
        """Give the loss and a standard error more: other text may lose more."""
        if self.kind == "ratio":
            return bounded_exp(summary.log_ratio + (summary.log_ratio_se or 0.0))
        return (summary.kld_mean or 0.0) + (summary.kld_se or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPlan:
    """What a plan is made for."""

    request: PlanRequest
    budget: Budget
    model: RunModel
    target: Target
    recipe: Recipe
    """The recipe of the calibration."""
    engines: tuple[Engine, ...]
    """All have to load the checkpoint."""
    emulated: Engine
    """The first whose arithmetic is known."""
    gpu: str | None
    schemes: tuple[str, ...]
    """Schemes to choose from that the engines load."""
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


@contextmanager
def open_plan(request: PlanRequest) -> Iterator[OpenedPlan]:
    """Open the model and its texts."""
    names = [request.engine] if isinstance(request.engine, str) else list(request.engine)
    if not names:
        raise UsageError("--engine: no name given", hint="leave out --engine to plan for vllm")
    engines = tuple(map(find_replayed, dict.fromkeys(names)))
    gpu = None if request.gpu is None else find_gpu(request.gpu)
    for engine in engines:
        if engine.replay_folder is None:
            raise UsageError(f"--engine {engine.key}: {engine.no_folder}")
        if gpu is not None and not knows_gpus(engine):
            what = f"--gpu {gpu}: what {engine.release} serves on it is not known"
            raise UsageError(what, hint="use --engine vllm, or leave out --gpu")
    budget = make_budget(request)
    asked = [request.scheme] if isinstance(request.scheme, str) else request.scheme or SCHEMES
    schemes = tuple(name for name in dict.fromkeys(asked) if name != NO_SCHEME)
    if request.samples < 2:
        hint = "use --samples 2 or more: some are held out from the search"
        raise UsageError(f"--samples {request.samples}: plan needs two sequences", hint=hint)
    known = [name for name in names if name.partition("==")[0] in list_emulated()]
    emulated = find_emulated(known[0])[0] if known else REFERENCE
    numerics = emulated.numerics
    assert numerics is not None  # noqa: S101 -- of an emulated engine it is known
    if gpu is not None:
        numerics = replace(numerics, unmultiplied=list_unmultiplied(emulated, gpu))
    recipe = load_recipe("kv")
    data = recipe.data.model_copy(update={"batch_size": request.batch_size})
    recipe = recipe.model_copy(update={"data": data})
    with open_run_model(request, recipe=recipe) as model:
        if model.checkpoint.form:
            what = f"{request.model} is quantized already: {model.checkpoint.form}"
            raise ModelError(what, hint="name the unquantized model that it was made from")
        fingerprint = fingerprint_model(model.source.raw_config, model.checkpoint.stored)
        calibration, held_out = plan_texts(request, model.source)
        yield OpenedPlan(
            request=request,
            budget=budget,
            model=model,
            target=Target(
                prepared=model.prepared,
                fingerprint=fingerprint,
                numerics=numerics,
            ),
            recipe=recipe,
            engines=engines,
            emulated=emulated,
            gpu=gpu,
            schemes=schemes,
            calibration=calibration,
            search=take_sequences(calibration, 0, _SEARCHED),
            held_out=held_out,
            tag=f"fp8calib plan 2 {fingerprint} {calibration.fingerprint} {held_out.fingerprint} "
            f"{model.dtype} {emulated.key} {request.gpu} {request.batch_size} {request.stats}",
        )


def make_budget(request: PlanRequest) -> Budget:
    """Make the budget; refuse none, several, and impossible ones."""
    given = {"kld": request.max_kld, "ratio": request.max_ratio, "bytes": request.max_bytes}
    named = {kind: value for kind, value in given.items() if value is not None}
    if len(named) != 1:
        options = [f"--max-{kind}" for kind in named]
        hint = "add --max-kld NATS or --max-ratio R for the least bytes, or --max-bytes SIZE for "
        hint += "the least loss"
        if options:
            hint = f"leave out {' or '.join(options)}"
        what = " and ".join(options) or "no budget"
        raise UsageError(f"{what}: one budget is needed", hint=hint)
    ((kind, value),) = named.items()
    limit = read_size(value) if kind == "bytes" else float(value)
    least = 1 if kind == "ratio" else 0
    if limit <= least:
        raise UsageError(f"--max-{kind} {limit}: must be above {least}")
    name = {
        "kld": f"least bytes with a KLD of at most {limit:g}",
        "ratio": f"least bytes with a perplexity ratio of at most {limit:g}",
        "bytes": f"least KLD with at most {value}{' of the unquantized bytes' * (limit <= 1)}",
    }
    return Budget(name=name[kind], kind=kind, limit=limit)


def plan_texts(request: PlanRequest, source: ModelSource) -> tuple[DataPlan, DataPlan]:
    """Plan the text of the calibration and the one that is held out."""
    given = request.data
    specs = (given,) if isinstance(given, str | Path) else given or ()
    data = read_settings(request, tuple(map(str, specs)))

    def plan(part: BuiltinPart, samples: int) -> DataPlan:
        settings = data.model_copy(update={"samples": samples})
        return plan_text(source, settings, part=part, few="")

    if data.sources:
        whole = plan("calibrate", data.samples)
        total = len(whole.sequences)
        if total < 2:
            raise DataError(
                f"{', '.join(whole.sources)}: one sequence cannot be split",
                hint="use more text, or a shorter --seq-len",
            )
        count = total - max(1, round(total * _HELD_OUT))
        calibration = take_sequences(whole, 0, count)
        held_out = take_sequences(whole, count, total)
    else:
        number = max(1, round(data.samples * _HELD_OUT))
        calibration = plan("calibrate", data.samples - number)
        held_out = plan("verify", number)
    media = (_NO_MEDIA,) if calibration.media and not held_out.media else ()
    return warn_of_few(calibration), replace(held_out, warnings=(*held_out.warnings, *media))
