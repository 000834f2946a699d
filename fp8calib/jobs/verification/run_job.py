"""The comparison of a model with its candidates: opened, then run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from platform import python_version
from typing import Any

import torch

from fp8calib.data.rows import Row
from fp8calib.data.sequences import FEW_TOKENS, DataPlan, list_other_warnings
from fp8calib.errors import Fp8CalibError, ModelError, UsageError, VerificationError
from fp8calib.geometry.sites import Role
from fp8calib.jobs.models import RunModel, fields_of
from fp8calib.jobs.text import plan_text
from fp8calib.jobs.verification.job import JobCompanion, VerifyJob, VerifyOptions
from fp8calib.jobs.verification.loadable import judge_loading, warn_of_loading
from fp8calib.jobs.verification.memory import open_reference
from fp8calib.jobs.verification.request import build_request, find_fault, list_histograms
from fp8calib.machine.memory import PeakMemory
from fp8calib.machine.progress import Progress
from fp8calib.model.live_model import LiveCheckpoint
from fp8calib.model.load import LoadedModel, ModelSource
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.stored_parameters import list_leftovers
from fp8calib.numerics.schemes import Scheme
from fp8calib.recipe import Data
from fp8calib.run.memory_plan import MemoryPlan
from fp8calib.stats.calibration_origin import estimate_overlap
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.fingerprint import fingerprint_model, versions
from fp8calib.verification.candidates import (
    OpenedCandidate,
    Target,
    open_candidate,
    open_stats,
)
from fp8calib.verification.emulation.decoding import find_decoded
from fp8calib.verification.report import RefusedCandidate, RunProvenance
from fp8calib.verification.verify import (
    VerificationResult,
    list_emulations,
)
from fp8calib.verification.verify import verify as compare

_SMALLEST_SHARE = 0.01
_SETTINGS = (
    *("engine", "scheme", "rules", "fp8_dtype", "kv_cache_dtype_skip_layers"),
    *("samples", "seq_len", "batch_size", "pack", "text_column"),
)


def plan_verified(
    source: ModelSource, data: Data, rows: Iterable[Row] | None, tokenizer: Any
) -> DataPlan:
    """Plan the text of a verification; the warnings are about figures, not about scales.

    Raises:
        UsageError: the length is above the model's maximum, or a data spec is invalid.
        DataError: the data cannot be read.
    """
    plan = plan_text(source, data, rows=rows, part="verify", tokenizer=tokenizer)
    few = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: the figures are imprecise"
    is_few = plan.num_tokens < FEW_TOKENS
    return replace(plan, warnings=(*list_other_warnings(plan), *((few,) if is_few else ())))


def open_verify_job(
    model: RunModel,
    options: VerifyOptions,
    text: DataPlan | Callable[[ModelSource], DataPlan],
    *,
    companion: JobCompanion | None = None,
    say: Callable[[str], None] | None = None,
) -> VerifyJob:
    """Open the candidates and the text, and refuse what cannot be emulated before loading weights.

    Args:
        model: the unquantized model.
        options: what to compare it with.
        text: the text, or what plans it.
        companion: what is compared with the same text.
        say: gets notes of the companion; without it, the companion is not asked.

    Raises:
        UsageError: options contradict each other.
        DataError: the text cannot be read.
        ModelError: a candidate cannot be read or emulated, or belongs to another model.
    """
    _require_head(model)
    target = Target(
        checkpoint=model.checkpoint,
        fingerprint=fingerprint_model(model.source.raw_config, model.checkpoint.stored),
        geometry=model.prepared.geometry,
    )
    opened, left_out = _open_candidates(options, target)
    plan = text if isinstance(text, DataPlan) else text(model.source)
    request = options.request
    if request.decode:
        require_text(plan, "--decode")
    if request.decode and not bool(find_decoded(list(map(len, plan.sequences))).any()):
        hint = "use longer text, or a larger --seq-len"
        raise UsageError("--decode: no sequence is longer than 2 tokens", hint=hint)
    if companion is not None and say is not None:
        plan = companion.connect(model.source, plan, say)
    job = VerifyJob(
        **fields_of(model),
        options=options,
        target=target,
        opened=opened,
        plan=plan,
        companion=companion,
        refused=(),
        left_out=left_out,
        warnings=(),
    )
    try:
        build_request(job, model.prepared.model)
    except (ModelError, VerificationError):
        job = _leave_unfit(job)
        build_request(job, model.prepared.model)
    loading = judge_loading(options, model, job.opened)
    return replace(
        job,
        refused=loading.refused.keys() | loading.unused.keys(),
        warnings=(
            *map(str, job.left_out),
            *model.describe_decoded(),
            *_warn_of_leftovers(model.name, model.prepared),
            *_warn_of_overlap(plan, job.opened),
            *_warn_of_ignored_kv(options.scheme, job.opened),
            *warn_of_loading(options, loading),
        ),
    )


def _leave_unfit(job: VerifyJob) -> VerifyJob:
    """Leave out the candidates that cannot be emulated."""
    faults = {each.name: find_fault(job, each, job.prepared.model) for each in job.opened}
    left_out = {name: fault for name, fault in faults.items() if fault is not None}
    _require_one(faults, left_out)
    return replace(
        job,
        opened=tuple(each for each in job.opened if each.name not in left_out),
        left_out=(*job.left_out, *map(_refuse, left_out, left_out.values())),
    )


def _require_one(names: Collection[str], faults: Mapping[str, Fp8CalibError]) -> None:
    """Raise the first fault if it leaves no candidate."""
    if faults and len(faults) == len(names):
        raise next(iter(faults.values()))


def _refuse(name: str, fault: Fp8CalibError) -> RefusedCandidate:
    return RefusedCandidate(name=name, why=fault.message)


def require_text(plan: DataPlan, option: str) -> None:
    """Refuse rows with media, naming the option that takes text alone.

    Raises:
        UsageError: there are such rows.
    """
    if plan.media:
        kinds = " and ".join(list(plan.tokens_by_modality)[1:])
        raise UsageError(
            f"{option}: the data has {kinds}, and this takes text alone",
            hint="leave it out, or use rows of text",
        )


def run_verify_job(
    job: VerifyJob, mode: MemoryPlan, progress: Progress, *, command: str = ""
) -> VerificationResult:
    """Run the comparison of a job; `command` is the command line of the run.

    Raises:
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity, or weights cannot be replaced.
    """
    with PeakMemory() as peak, _open_held(job, mode, progress) as reference:
        request = build_request(job, reference.model.model)
        plan = job.plan
        if job.companion is not None:
            plan = job.companion.begin(
                plan, None if mode.streaming else reference.model.model, progress
            )
        verified = compare(
            reference,
            request,
            plan,
            batch_size=job.options.request.batch_size,
            progress=progress,
            companion=job.companion,
        )
    memory = {**mode.as_json(), "peak_measured_bytes": peak.peak_bytes}
    provenance = RunProvenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        model_hash=job.target.fingerprint,
        data_hash=verified.data,
        versions={**versions(job.plan.tokens_by_modality), "python": python_version()},
        settings={name: getattr(job.options.request, name) for name in _SETTINGS},
        numerics=job.options.numerics.list_differences(),
    )
    options = job.options
    has_page = options.request.report is not None
    return _change_report(
        verified,
        histograms=tuple(list_histograms(job, request.candidates)) if has_page else (),
        memory=memory,
        provenance=provenance,
    )


def _require_head(model: RunModel) -> None:
    """Refuse a model that predicts no tokens.

    Raises:
        ModelError: naming its class.
    """
    if model.prepared.model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model.prepared.model).__name__} has no output head, so it predicts no tokens "
            "whose divergence could be measured",
            hint="verify the model with its language-model head (a ...ForCausalLM class)",
        )


@contextmanager
def _open_held(job: VerifyJob, mode: MemoryPlan, progress: Progress) -> Iterator[Any]:
    """Open the model; of one in memory, copy the weights that candidates replace."""
    if isinstance(job.checkpoint, LiveCheckpoint):
        emulations = list_emulations(build_request(job, job.prepared.model))
        if any(each.weights for each in emulations):
            _refuse_inference_tensors(job.prepared.model)
            job.checkpoint.hold()
    with open_reference(job, mode, progress) as opened:
        yield opened


def _refuse_inference_tensors(model: LoadedModel) -> None:
    """Refuse a model whose weights cannot be replaced for a while.

    Raises:
        UsageError: naming the first.
    """
    named: Iterator[tuple[str, torch.nn.Parameter]] = model.named_parameters()
    for name, parameter in named:
        if parameter.is_inference():
            raise UsageError(
                f"{name} was made in torch.inference_mode(), so it cannot be quantized in place",
                hint="load the model outside of inference_mode, or pass its path",
            )


def _change_report(verified: VerificationResult, **fields: Any) -> VerificationResult:
    return replace(verified, report=verified.report.model_copy(update=fields))


def _open_candidates(
    options: VerifyOptions, target: Target
) -> tuple[tuple[OpenedCandidate, ...], tuple[RefusedCandidate, ...]]:
    """Open the candidates; one that cannot be read is left out while another is left."""
    opened: list[OpenedCandidate] = []
    faults: dict[str, Fp8CalibError] = {}
    for index, item in enumerate(options.scales):
        name = f"statistics-{index}" if index else "statistics"
        try:
            if isinstance(item, CalibrationStats):
                opened.append(open_stats(name, item, target))
            else:
                name = item
                opened.append(open_candidate(name, target, options.numerics))
        except ModelError as error:
            faults[name] = error
    _require_one([*faults, *(each.name for each in opened)], faults)
    return tuple(opened), tuple(map(_refuse, faults, faults.values()))


def _warn_of_leftovers(name: str, found: PreparedModel) -> Iterator[str]:
    if leftovers := list_leftovers(found.weights):
        yield f"{name}: not parameters of the model, so not loaded: {', '.join(leftovers)}"


def _find_overlaps(
    plan: DataPlan, opened: tuple[OpenedCandidate, ...]
) -> Iterator[tuple[str, float]]:
    """Find the candidates that were calibrated on this text, and the share of it."""
    text = plan.text.distinctive()
    for candidate in opened:
        measured = candidate.origin
        if measured is not None and (share := estimate_overlap(text, measured.text)):
            yield candidate.name, share


def _warn_of_overlap(plan: DataPlan, opened: tuple[OpenedCandidate, ...]) -> Iterator[str]:
    for name, share in _find_overlaps(plan, opened):
        about = f"about {share:.0%}" if share >= _SMALLEST_SHARE else "less than 1%"
        yield f"{name}: {about} of this text was used for calibration, so its figures are too good"


def _warn_of_ignored_kv(
    scheme: Scheme | None, opened: tuple[OpenedCandidate, ...]
) -> Iterator[str]:
    for candidate in opened if scheme is not None else ():
        sites = () if candidate.stats is None else candidate.stats.sites
        if any(site.role is Role.K for site in sites):
            yield (
                f"{candidate.name}: its KV scales are ignored, as --scheme quantizes weights and "
                "inputs only; leave out --scheme to verify them"
            )
