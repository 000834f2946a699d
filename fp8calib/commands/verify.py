"""Compare a model, on a path or in memory, with its FP8 emulation on the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.data.sequences import DataPlan
from fp8calib.data.sources import split_data
from fp8calib.data.specs import Specs
from fp8calib.errors import ModelError, UsageError
from fp8calib.jobs.function import as_function
from fp8calib.jobs.hashes import hash_run
from fp8calib.jobs.models import open_run_model
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.text import read_settings
from fp8calib.jobs.verification.dump import is_dump, write_dump
from fp8calib.jobs.verification.job import JobCompanion, VerifyJob
from fp8calib.jobs.verification.memory import choose_verification_mode
from fp8calib.jobs.verification.options import (
    if_quantized,
    list_scales,
    resolve_options,
)
from fp8calib.jobs.verification.request import build_request
from fp8calib.jobs.verification.run_job import (
    open_verify_job,
    plan_verified,
    run_verify_job,
)
from fp8calib.jobs.verification.suggest import suggest_command
from fp8calib.machine.command_line import spell_command
from fp8calib.model.load import ModelSource
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.hashes import RunHashes
from fp8calib.results.run_plan import RunPlan
from fp8calib.results.verify import VerifyResult
from fp8calib.run.memory_plan import MemoryPlan
from fp8calib.verification.candidates import find_candidate
from fp8calib.verification.judge.gates import GATES, Gate
from fp8calib.verification.page.page import is_page, write_page
from fp8calib.verification.verify import VerificationResult


def run(
    request: VerifyRequest, reporter: Reporter, companion: JobCompanion | None = None
) -> VerifyResult | RunPlan:
    """Verify a model, and write the files that are asked for.

    `companion` is what a plug-in compares with the same text.

    A model in memory keeps its parameters, hooks, caches and modes. Where a candidate quantizes
    weights, they are replaced while it runs, and copied before that to the memory of the host.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model or a candidate cannot be read, or do not belong together.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity.
        ExportError: a file cannot be written.
    """
    _check_outputs(request, reporter)
    options = replace(resolve_options(request), measures_noise=True)
    specs, rows = split_data(request.data, text_column=request.text_column)
    settings = read_settings(request, specs)

    def plan(source: ModelSource) -> DataPlan:
        return plan_verified(source, settings, rows, request.tokenizer)

    with open_run_model(request, if_quantized=if_quantized(str(request.model))) as model:
        say = None if request.dry_run else reporter.say
        job = open_verify_job(model, options, plan, companion=companion, say=say)
        told = (*job.plan.warnings, *job.warnings)
        for note in told:
            reporter.warn(note)
        alone = None if companion is None else companion.compare_alone(job, reporter)
        if alone is not None:
            return finish(request, alone, reporter, options.gate)
        mode = choose_verification_mode(job)
        if request.dry_run:
            return _describe_plan(job, mode)
        for note in mode.describe():
            reporter.say(note)
        reporter.say(f"computing in {job.dtype} on {job.device} ({job.dtype_why})")
        hashes = _hash_files(job, specs)
        verified = run_verify_job(job, mode, reporter, command=spell_command())
    for note in verified.report.warnings:
        if note not in told:
            reporter.warn(note)
    return finish(request, verified, reporter, options.gate, hashes)


def _hash_files(job: VerifyJob, specs: Sequence[str]) -> RunHashes:
    """Hash the files of the model, of the text and of what is compared with it.

    Raises:
        ModelError: one cannot be read.
    """
    left = {each.name for each in job.opened}
    scales = [each for each in job.options.scales if isinstance(each, str) and each in left]
    try:
        return hash_run(
            None if job.is_live else job.source.folder,
            specs,
            {each: find_candidate(each) for each in scales},
        )
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _describe_plan(job: VerifyJob, mode: MemoryPlan) -> RunPlan:
    """Describe the planned run."""
    planned = build_request(job, job.prepared.model)
    names = [each.name for each in planned.candidates]
    return RunPlan(
        plan={
            "model": job.name,
            "architecture": job.target.geometry.architecture,
            "layers": len(job.target.geometry.layers),
            "weights_size_bytes": job.checkpoint.total_size_bytes,
            "engine": job.options.engine.key,
            "candidates": names,
            "dtype": job.dtype,
            "dtype_why": job.dtype_why,
            "device": job.device,
            "sequences": len(job.plan.sequences),
            "tokens": job.plan.num_tokens,
            "data": list(job.plan.sources),
            **mode.as_json(),
        }
    )


def finish(
    request: VerifyRequest,
    verified: VerificationResult,
    reporter: Reporter,
    gate: Gate | None,
    hashes: RunHashes | None = None,
) -> VerifyResult:
    """Write all output files, or none; an error carries the result, which may have cost hours.

    Raises:
        ExportError: a file cannot be written.
    """
    gates = GATES if gate is None else {gate.name: gate}
    used = dict.fromkeys(each.gate for each in verified.report.candidates)
    result = VerifyResult(
        **dict(verified.report),
        gates=tuple(gates[name] for name in used),
        hashes=hashes,
        next=suggest_command(verified.report, request),
        has_gate=request.gate is not None,
        is_strict=request.strict,
    )
    try:
        if request.dump is not None:
            write_dump(Path(request.dump), verified)
        if request.report is not None:
            write_page(result, Path(request.report), command=result.next)
    except Exception as error:
        error.result = result  # type: ignore[attr-defined]
        raise
    if request.dump is not None:
        count = len(verified.logprobs)
        reporter.say(f"log-probabilities of {count} models written to {request.dump}")
    if request.report is not None:
        reporter.say(f"report written to {request.report}")
    return result


def _check_outputs(request: VerifyRequest, reporter: Reporter) -> None:
    """Refuse outputs that cannot be written or would replace an input, before hours of work.

    Raises:
        UsageError: naming the path.
    """
    kinds = (
        *([(Path(request.report), is_page, "no page")] if request.report else []),
        *([(Path(request.dump), is_dump, "no dump")] if request.dump else []),
    )
    outputs = [path for path, _, _ in kinds]
    if request.force and not outputs:
        reporter.warn("--force has no effect without --report or --dump")
    for path in outputs:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such folder: {path.parent}")
        check_output_file(path, force=request.force)
        for source in _list_inputs(request):
            _refuse_input(path, source)
    for output, is_ours, other in kinds:
        if output.exists() and output.stat().st_size and not is_ours(output):
            raise UsageError(
                f"{output}: exists, and is {other} of verify", hint="name another file"
            )
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UsageError(f"--report and --dump are both {outputs[0]}")


def _refuse_input(path: Path, source: Path) -> None:
    try:
        is_inside = source.exists() and path.resolve().is_relative_to(source.resolve())
    except (OSError, ValueError):
        return
    if is_inside and (path.exists() or source.is_file()):
        raise UsageError(f"{path} would replace an input", hint="name another file")


def _list_inputs(request: VerifyRequest) -> Iterator[Path]:
    """List the inputs that are paths."""
    data = request.data
    specs = data if isinstance(data, Specs) else [data]
    for each in (request.model, *list_scales(request.scales), *specs):
        if isinstance(each, str | Path):
            yield Path(each)


verify = as_function("verify", VerifyRequest, run)
