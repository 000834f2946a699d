"""Run `fp8calib verify`: open the model and the candidates, plan, compare, write, print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fp8calib.checkpoint.output_files import output_files
from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.cli.command_line import spell_command
from fp8calib.cli.console import Bar, print_json, say, warn
from fp8calib.cli.plan_table import show_plan
from fp8calib.cli.setup import describe_decoded, plan_data, quiet_libraries
from fp8calib.cli.verify.job import ResolvedOptions, TaskJob, VerifyJob
from fp8calib.cli.verify.memory import choose_verification_mode, open_reference
from fp8calib.cli.verify.options import resolve_options
from fp8calib.cli.verify.request import build_request
from fp8calib.cli.verify.settings import VerifySettings
from fp8calib.cli.verify.show import (
    describe_report,
    describe_verification_plan,
    show_verification,
    suggest_command,
)
from fp8calib.data.plan import FEW_TOKENS, DataPlan
from fp8calib.errors import VerificationError
from fp8calib.fp8.schemes import Scheme
from fp8calib.geometry.sites import Role
from fp8calib.machine.memory import PeakMemory
from fp8calib.model.dtype import choose_dtype
from fp8calib.model.load import (
    ModelSource,
    build_skeleton,
    load_tokenizer,
    open_source,
    without_quantization,
)
from fp8calib.model.prepared import PreparedModel, prepare
from fp8calib.model.stored_parameters import list_leftovers
from fp8calib.quantization.sources.decoded import open_model
from fp8calib.run.forward.decoder import check_runnable
from fp8calib.run.planning.whole_or_streamed import MemoryMode
from fp8calib.stats.calibration_origin import estimate_overlap
from fp8calib.stats.fingerprint import fingerprint_model, versions
from fp8calib.verification.candidates import OpenedCandidate, Target, open_candidate
from fp8calib.verification.html.page import write_page
from fp8calib.verification.report import RunProvenance, Verdict, VerifyReport
from fp8calib.verification.tasks.lm_eval import run_tasks
from fp8calib.verification.tasks.task_files import open_tasks
from fp8calib.verification.verify import (
    ReferenceModel,
    VerificationRequest,
    VerificationResult,
    verify,
)

_SMALLEST_SHARE = 0.01
_CANNOT_TELL = 9
"""The exit code of a gate that there is too little text for."""


def run_verify(settings: VerifySettings) -> int:
    """Verify a model, print the outcome and return the exit code."""
    quiet_libraries()
    options = resolve_options(settings)
    with _open_job(settings, options) as job:
        for text in (*job.plan.warnings, *job.warnings):
            warn(text)
        mode = choose_verification_mode(job)
        if settings.dry_run:
            plan = describe_verification_plan(job, mode)
            show_plan(plan, "plan (nothing was run)", as_json=settings.as_json)
            return 0
        for text in mode.describe():
            say(text)
        with Bar() as bar, PeakMemory() as memory:
            verified = _run(job, mode, bar)
        measured = {**mode.as_json(), "peak_measured_bytes": memory.peak_bytes}
        verified = _change_report(verified, memory=measured, provenance=_find_provenance(job))
        for text in verified.report.warnings:
            if text not in (*job.plan.warnings, *job.warnings):
                warn(text)
    try:
        _write(settings, verified)
    except Exception:
        show_verification(verified.report, settings)  # the run may have taken hours
        raise
    if settings.as_json:
        print_json(describe_report(verified.report, settings))
    show_verification(verified.report, settings)
    return _exit_code(settings, verified.report)


@contextmanager
def _open_job(settings: VerifySettings, options: ResolvedOptions) -> Iterator[VerifyJob]:
    source = open_source(
        settings.model,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        if_quantized=None,
    )
    with open_model(
        source.folder,
        if_quantized="pass the model it was made from as MODEL, and this one as "
        f"--scales {settings.model}",
    ) as checkpoint:
        if checkpoint.form:
            source = without_quantization(source)
        dtype, why = choose_dtype(settings.dtype, device=options.device, checkpoint=checkpoint)
        found = prepare(build_skeleton(source), checkpoint)
        check_runnable(found.model)
        target = Target(
            checkpoint=checkpoint,
            fingerprint=fingerprint_model(source.raw_config, checkpoint.stored),
            geometry=found.geometry,
        )
        opened = tuple(open_candidate(name, target, options.numerics) for name in settings.scales)
        plan, server = _plan(settings, source), None
        if settings.server is not None and not settings.dry_run:
            from fp8calib.cli.verify.server import open_server  # noqa: PLC0415 -- imports httpx

            server, plan = open_server(settings, source, plan)
        job = VerifyJob(
            settings=settings,
            options=options,
            source=source,
            checkpoint=checkpoint,
            skeleton=found.model,
            target=target,
            opened=opened,
            plan=plan,
            server=server,
            task_job=_open_tasks(settings, source),
            dtype=dtype,
            dtype_why=why,
            warnings=(),
        )
        build_request(job, found.model)  # refuse what cannot be emulated before weights are loaded
        yield replace(
            job,
            warnings=(
                *describe_decoded(settings.model, checkpoint),
                *_warn_of_leftovers(settings.model, found),
                *_warn_of_overlap(job.plan, opened),
                *_warn_of_ignored_kv(options.scheme, opened),
            ),
        )


def _plan(settings: VerifySettings, source: ModelSource) -> DataPlan:
    plan = plan_data(
        source,
        sources=settings.data or (),
        samples=settings.samples,
        seq_len=settings.seq_len,
        pack=not settings.no_pack,
        seed=0,
        part="verify",
    )
    warnings = (text for text in plan.warnings if "scales may miss" not in text)
    few = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: the figures are imprecise"
    is_few = plan.num_tokens < FEW_TOKENS
    return replace(plan, warnings=(*warnings, *((few,) if is_few else ())))


def _open_tasks(settings: VerifySettings, source: ModelSource) -> TaskJob | None:
    if not settings.tasks:
        return None
    tokenizer = load_tokenizer(source, int(source.text_config.vocab_size))
    say(f"loading tasks: {', '.join(settings.tasks)}")
    return TaskJob(tasks=open_tasks(settings.tasks, limit=settings.limit), tokenizer=tokenizer)


def _warn_of_leftovers(name: str, found: PreparedModel) -> Iterator[str]:
    if leftovers := list_leftovers(found.model, found.weights):
        yield f"{name}: not parameters of the model, so not loaded: {', '.join(leftovers)}"


def _warn_of_overlap(plan: DataPlan, opened: tuple[OpenedCandidate, ...]) -> Iterator[str]:
    text = plan.text.distinctive()
    for candidate in opened:
        measured = candidate.origin
        share = 0.0 if measured is None else estimate_overlap(text, measured.text)
        if share:
            about = f"about {share:.0%}" if share >= _SMALLEST_SHARE else "less than 1%"
            yield (
                f"{candidate.name}: {about} of this text was used for calibration, so its "
                "figures are too good"
            )


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


def _run(job: VerifyJob, mode: MemoryMode, bar: Bar) -> VerificationResult:
    say(f"computing in {job.dtype} on {job.options.device} ({job.dtype_why})")
    if mode.streaming is None:
        bar.stage("loading the model", None)
    with open_reference(job, mode) as (reference, comparison):
        request = build_request(job, reference.model)
        answers = None
        if job.server is not None:
            from fp8calib.cli.verify.server import ask_server  # noqa: PLC0415 -- imports httpx

            answers = ask_server(job.server, job.plan, bar)
        verified = verify(
            reference,
            request,
            job.plan,
            batch_size=job.settings.batch_size,
            progress=bar,
            comparison=comparison,
            server=answers,
        )
        if job.task_job is None:
            return verified
        return _add_tasks(job, job.task_job, reference, request, verified, bar)


def _find_provenance(job: VerifyJob) -> RunProvenance:
    return RunProvenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=spell_command(),
        model_hash=job.target.fingerprint,
        data_hash=job.plan.fingerprint,
        versions=versions(),
    )


def _change_report(verified: VerificationResult, **fields: Any) -> VerificationResult:
    return replace(verified, report=verified.report.model_copy(update=fields))


def _add_tasks(
    job: VerifyJob,
    task_job: TaskJob,
    reference: ReferenceModel,
    request: VerificationRequest,
    verified: VerificationResult,
    bar: Bar,
) -> VerificationResult:
    outcome = run_tasks(
        reference,
        request.candidates,
        task_job.tasks,
        task_job.tokenizer,
        batch_size=job.settings.batch_size,
        progress=bar,
    )
    for text in outcome.warnings:
        warn(text)
    return _change_report(
        verified,
        tasks=outcome.rows,
        task_setup=outcome.setup,
        warnings=(*verified.report.warnings, *outcome.warnings),
    )


def _write(settings: VerifySettings, verified: VerificationResult) -> None:
    """Write both output files, or neither."""
    paths = [path for path in (settings.dump, settings.report) if path is not None]
    with output_files(paths) as places:
        if settings.dump is not None:
            logprobs = dict(verified.logprobs)
            save_tensors(places[settings.dump], logprobs, metadata={"format": "pt"})
        if settings.report is not None:
            command = suggest_command(verified.report, settings)
            write_page(verified.report, places[settings.report], command=command)
    if settings.dump is not None:
        say(f"log-probabilities of {len(verified.logprobs)} models written to {settings.dump}")
    if settings.report is not None:
        say(f"report written to {settings.report}")


def _exit_code(settings: VerifySettings, report: VerifyReport) -> int:
    if settings.gate is None or report.passed:
        return 0
    is_failed = Verdict.FAIL in report.judged
    return VerificationError.exit_code if is_failed else _CANNOT_TELL
