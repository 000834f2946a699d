"""Run `fp8calib verify`: open the model and the candidates, plan, compare, write, print."""

from __future__ import annotations

from fp8calib.api.verify.alone import run_alone
from fp8calib.api.verify.comparison import VerificationText, open_verify_job, run_verify_job
from fp8calib.api.verify.dump import gather_alone, write_dump
from fp8calib.api.verify.job import ServerRequest, VerifyJob
from fp8calib.api.verify.memory import choose_mode_beside
from fp8calib.api.verify.run import if_quantized
from fp8calib.checkpoint.output_files import output_files
from fp8calib.cli.command_line import spell_command
from fp8calib.cli.console import Bar, print_json, prints_json, say, warn
from fp8calib.cli.plan_table import show_plan
from fp8calib.cli.setup import make_placement, quiet_libraries
from fp8calib.cli.verify.options import resolve_settings
from fp8calib.cli.verify.show import (
    describe_report,
    describe_verification_plan,
    show_verification,
    suggest_command,
)
from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.jobs.models import open_run_model
from fp8calib.requests.verify import VerifyRequest
from fp8calib.render.page.page import write_page
from fp8calib.verification.report import Verdict, VerifyReport
from fp8calib.verification.verify import VerificationResult


def run_verify(settings: VerifyRequest) -> int:
    """Verify a model, print the outcome and return the exit code."""
    quiet_libraries()
    options = resolve_settings(settings)
    if settings.tasks:
        say(f"loading tasks: {', '.join(settings.tasks)}")
    text = VerificationText(
        specs=settings.data or (),
        text_column=settings.text_column,
        samples=settings.samples,
        seq_len=settings.seq_len,
        pack=not settings.no_pack,
    )
    with open_run_model(
        settings.model,
        make_placement(settings),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        if_quantized=if_quantized(settings.model),
    ) as model:
        job = open_verify_job(model, options, text, server=_make_request(settings))
        for note in (*job.plan.warnings, *job.warnings):
            warn(note)
        mode = None
        if settings.reference_dump is None:
            reference = None if settings.dry_run else settings.reference_server
            mode = choose_mode_beside(
                job, reference=reference, warn=warn, expects_duration=settings.dry_run
            )
        if mode is None:
            return _finish(settings, _run_alone(job, settings))
        if settings.dry_run:
            described = describe_verification_plan(job, mode)
            show_plan(described, "plan (nothing was run)", as_json=prints_json())
            return 0
        for note in mode.describe():
            say(note)
        say(f"computing in {job.dtype} on {job.device} ({job.dtype_why})")
        with Bar() as bar:
            verified = run_verify_job(job, mode, bar, command=spell_command())
        for note in verified.report.warnings:
            if note not in (*job.plan.warnings, *job.warnings):
                warn(note)
    return _finish(settings, verified)


def _finish(settings: VerifyRequest, verified: VerificationResult) -> int:
    """Write the outputs, print the report and return the exit code."""
    try:
        _write(settings, verified)
    except Exception:
        show_verification(verified.report, settings)  # the run may have taken hours
        raise
    if prints_json():
        print_json(describe_report(verified.report, settings))
    show_verification(verified.report, settings)
    return _exit_code(settings, verified.report)


def _make_request(settings: VerifyRequest) -> ServerRequest | None:
    """Make the request to the server of --server; None where none is asked."""
    if settings.server is None or settings.dry_run:
        return None
    return ServerRequest(
        url=settings.server,
        model=settings.server_model,
        kind=settings.server_kind,
        num_top=settings.server_logprobs,
        concurrency=settings.server_concurrency,
        timeout_s=settings.server_timeout,
        is_sampled=settings.sampled,
        reference=settings.reference_server,
        reference_model=settings.reference_server_model,
        say=say,
    )


def _run_alone(job: VerifyJob, settings: VerifyRequest) -> VerificationResult:
    """Compare the server with a dump or an unquantized server, without running the model."""
    evidence = gather_alone(job.plan, settings.reference_dump)
    with Bar() as bar:
        return run_alone(job, evidence, bar)


def _write(settings: VerifyRequest, verified: VerificationResult) -> None:
    """Write both output files, or neither."""
    paths = [path for path in (settings.dump, settings.report) if path is not None]
    with output_files(paths) as places:
        if settings.dump is not None:
            write_dump(places[settings.dump], verified)
        if settings.report is not None:
            command = suggest_command(verified.report, settings)
            write_page(verified.report, places[settings.report], command=command)
    if settings.dump is not None:
        say(f"log-probabilities of {len(verified.logprobs)} models written to {settings.dump}")
    if settings.report is not None:
        say(f"report written to {settings.report}")


def _exit_code(settings: VerifyRequest, report: VerifyReport) -> int:
    failure = None if settings.gate is None else report.find_failure(strict=settings.strict)
    if failure is None:
        return 0
    return CANNOT_TELL if failure is Verdict.CANNOT_TELL else VerificationError.exit_code
