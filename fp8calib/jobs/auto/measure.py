"""What `auto` measures: its options, its candidates, and the text that is held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.engines.check import replay_overlay
from fp8calib.engines.facts.gpus import find_gpu
from fp8calib.engines.registry import find_emulated, find_replayed
from fp8calib.engines.replay.folder import open_folder
from fp8calib.errors import ExportError, VerificationError
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import (
    CONSIDERED,
    SCHEMES,
    find_scheme,
    list_without_calibration,
)
from fp8calib.jobs.auto.decide import KV_AND_Q_SCALES, KV_SCALES
from fp8calib.jobs.models import RunModel
from fp8calib.jobs.planning.opened import OpenedPlan
from fp8calib.jobs.quantization.planned import replay_settings, resolve_recipe
from fp8calib.jobs.quantization.servable import find_fault, find_load_fault
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.verification.memory import choose_verification_mode
from fp8calib.jobs.verification.options import resolve_options
from fp8calib.jobs.verification.run_job import open_verify_job, run_verify_job
from fp8calib.machine.command_line import spell_command
from fp8calib.model.load import LoadedModel
from fp8calib.recipe import Quantize
from fp8calib.requests.auto import AutoRequest
from fp8calib.requests.verify import VerifyRequest
from fp8calib.scales.compute import compute_kv_scales, list_unfit_queries
from fp8calib.selection.select import select
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.modalities import keep_text
from fp8calib.verification.candidates import (
    Candidate,
    Target,
    build_kv_candidate,
    build_scheme,
)
from fp8calib.verification.report import CandidateResult, VerifyReport

OVERLAY = "kv-overlay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The model, its statistics, and the text that is held out."""

    task: AutoRequest
    opened: OpenedPlan
    stats: CalibrationStats
    reporter: Reporter

    def read_back(self, path: Path, left: Sequence[int] = ()) -> CandidateResult:
        """Verify a checkpoint that was written, the KV cache of the layers `left` in 16 bits."""
        found = self.compare(scales=[str(path)], left=left)
        place = str(Path(str(self.task.out)) / path.name)
        return found.candidates[0].model_copy(update={"name": path.name, "subject": place})

    def compare(
        self,
        make: Callable[[LoadedModel, Target], Sequence[Candidate]] | None = None,
        *,
        make_text_scaled: Callable[[LoadedModel, Target], Mapping[str, Candidate]] | None = None,
        scales: Sequence[str] = (),
        left: Sequence[int] = (),
        with_types: bool = False,
        with_noise: bool = False,
    ) -> VerifyReport:
        """Compare candidates with the model on the text that is held out, each by its own gate.

        Args:
            make: makes the candidates.
            make_text_scaled: makes some of them with the scales of the text alone.
            scales: paths of others.
            left: the layers whose KV cache stays in 16 bits in these.
            with_types: also compare the types of the KV cache that the GPU serves.
            with_noise: also compare the model with itself.
        """
        request = VerifyRequest(
            self.task.model,
            scales,
            engine=self.task.engine,
            batch_size=self.task.batch_size,
            gpu=self.task.gpu,
            kv_cache_dtype_skip_layers=left or None,
            kv_cache_dtype=("all",) if with_types else None,
        )
        options = replace(resolve_options(request), measures_noise=with_noise)
        job = open_verify_job(self.opened.model, options, self.opened.held_out)
        tables = {KV_SCALES: compute_kv_scales(self.stats, E4M3FN)} if with_types else {}
        job = replace(job, make_candidates=make, make_text_scaled=make_text_scaled, tables=tables)
        mode, command = choose_verification_mode(job), spell_command()
        return run_verify_job(job, mode, self.reporter, command=command).report


def list_considered(task: AutoRequest) -> tuple[str, ...]:
    """List the schemes to choose from; those of MXFP8 whose inputs are quantized if asked for."""
    if task.gate != "w8a8":
        return ()
    return (*CONSIDERED, "mxfp8") if task.mxfp8 else CONSIDERED


def list_candidates(
    measured: Measured, model: LoadedModel, target: Target, *, schemes: Iterable[str]
) -> Iterator[Candidate]:
    """List what could be written: scales of the KV cache, and each scheme.

    Raises:
        ModelError: the model cannot be quantized.
    """
    stats, numerics = measured.stats, measured.opened.numerics
    for name in (KV_SCALES, *((KV_AND_Q_SCALES,) if list_unfit_queries(stats) else ())):
        table = compute_kv_scales(stats, E4M3FN, query=name == KV_AND_Q_SCALES)
        yield build_kv_candidate(name, table, numerics, origin="statistics, amax")
    for name in schemes:
        scheme = find_scheme(name)
        yield build_scheme(name, scheme, target, model, numerics, fmt=E4M3FN, stats=stats)


def list_text_scaled(
    measured: Measured, model: LoadedModel, target: Target, *, schemes: Iterable[str]
) -> dict[str, Candidate]:
    """List the candidates with static scales again, with those of the text of rows with media."""
    text = keep_text(measured.stats)
    if text is None:
        return {}
    again = replace(measured, stats=text)
    static = [name for name in schemes if SCHEMES[name].has_static_inputs]
    found = list_candidates(again, model, target, schemes=static)
    return {candidate.name: candidate for candidate in found}


def require_usable(task: AutoRequest, model: RunModel) -> None:
    """Refuse a model that the engine cannot use, whatever the figures are, before text is run.

    Raises:
        ModelError: its weights cannot be quantized.
        VerificationError: the engine loads no scheme, or uses no KV scales.
    """
    if task.gate == "kv":
        why = find_unused_kv(task, model)
    else:
        select(model.checkpoint)
        names = list_without_calibration()
        refused = dict(list_refused(task, model, None, names))
        why = refused[names[0]] if len(refused) == len(names) else ""
    if why:
        raise VerificationError(f"{task.model}: {why}", hint="choose another --engine")


def find_unused_kv(task: AutoRequest, model: RunModel) -> str:
    """Say why the engine does not use KV scales of this model; empty where it does."""
    folder = open_folder(model.source.folder)
    report = replay_overlay(find_replayed(task.engine), model.prepared.geometry, 1, folder)
    fault = find_fault(report)
    return fault and f"{task.engine} does not use KV scales of this model: {fault}"


def list_refused(
    task: AutoRequest, model: RunModel, stats: CalibrationStats | None, schemes: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """List the schemes that the statistics lack sites for or the engine cannot load, and why."""
    engine = find_replayed(task.engine)
    gpu = None if task.gpu is None else find_gpu(task.gpu)
    for name in schemes:
        if gpu and (why := find_emulated(task.engine)[0].explain_unmultiplied(SCHEMES[name], gpu)):
            yield name, why
            continue
        asked = resolve_recipe(Quantize(scheme=name))
        try:
            _, reports, _ = replay_settings(model.source.folder, asked, stats, [engine])
        except ExportError as error:
            yield name, error.message
            continue
        if fault := next(filter(None, map(find_load_fault, reports.values())), ""):
            yield name, f"{task.engine} cannot load it: {fault}"
