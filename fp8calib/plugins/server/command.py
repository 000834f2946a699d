"""Compare a running server with the emulated candidates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.commands.hashes import FileHasher
from fp8calib.commands.model import open_run_model
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.verify_run import (
    announce,
    check_request,
    complete_report,
    describe_plan,
    find_scratch,
    finish,
    hash_inputs,
    open_verification,
    plan_verified,
)
from fp8calib.commands.verify_run import describe as describe_verification
from fp8calib.data.sequences import DataPlan
from fp8calib.data.sources import split_data
from fp8calib.errors import UsageError
from fp8calib.machine import PeakMemory
from fp8calib.model.prepared import PreparedModel
from fp8calib.plugins.server.ask import (
    Servers,
    check_dump,
    check_text,
    explain_streaming,
    gather_alone,
    open_servers,
)
from fp8calib.plugins.server.assess import ServerEvidence, assess
from fp8calib.plugins.server.faults import Fault, FaultRunner, changes_of, list_query_faults
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import SERVER, ServedResult, ServerVerifyResult
from fp8calib.plugins.server.row import add_server, report_alone
from fp8calib.plugins.server.served_candidates import compare_served, list_served
from fp8calib.text import Block, Line, Table
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.score import Scores
from fp8calib.verification.tables import describe_pair, format_mean_kld
from fp8calib.verification.verify import (
    Verification,
    open_scored,
    plan_verification,
    run_verification,
)


def run(request: ServerRequest, reporter: Reporter) -> ServerVerifyResult | RunPlan:
    """Verify a model, and name the candidate that explains the answers of a running server.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model, a candidate or the dump cannot be read, or do not belong together.
        DataError: the data cannot be read, or the dump is of another text.
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity.
        ServerError: a server fails.
        ExportError: a file cannot be written.
    """
    check_dump(request)
    check_request(request)
    specs, rows = split_data(request.data, text_column=request.text_column)
    with open_run_model(request) as model:
        servers: Servers | None = None

        def read_text() -> DataPlan:
            nonlocal servers
            text = plan_verified(request, model.source, specs, rows)
            check_text(request, text)
            if not request.dry_run:
                text, servers = open_servers(request, model.source, text, reporter.say)
            return text

        asked = open_verification(request, model, read_text)
        for note in asked.warnings:
            reporter.warn(note)
        faults = list_query_faults(asked.candidates)
        others = [replace(fault.emulation, name=name) for name, fault in faults.items()]
        if request.decode and not asked.numerics.prompt_reads_cache:
            others += list_served(asked.candidates)
        asked = replace(asked, others=tuple(others))
        if servers is not None and request.reference_dump is not None:
            return _compare_alone(request, asked, servers, reporter)
        try:
            mode = plan_verification(
                asked,
                model,
                find_scratch(request),
                cannot_stream=explain_streaming(request),
            )
        except UsageError as error:
            if servers is None or request.reference_server is None:
                raise
            reporter.warn(f"nothing is emulated here: {error.message}")
            return _compare_alone(request, asked, servers, reporter)
        if servers is None:
            return describe_plan(asked, model, mode)
        announce(mode, model, reporter)
        told = asked.warnings
        files = None if model.is_live else model.source.folder
        with (
            FileHasher(files, at_once=model.device != "cpu") as hasher,
            PeakMemory() as peak,
            open_scored(asked, model, mode, reporter) as scored,
        ):
            writer = None if isinstance(scored, StreamedModel) else scored.model
            text, answers = servers.ask(asked.plan, writer, reporter)
            asked = replace(asked, plan=text, watched=answers.watched, measures_noise=True)
            asked, report, scores = run_verification(asked, scored, reporter)
            evidence = _gather(asked, scores, scored, faults, reporter)
            assessment = assess(answers, evidence, text.sequences)
            hashes = hash_inputs(hasher, asked, request, specs)
    report = complete_report(asked, report, scores, request, model, mode, peak)
    for note in report.warnings:
        if note not in told:
            reporter.warn(note)
    gate = asked.gate or GATES[asked.candidates[0].default_gate]
    report = add_server(report, assessment, gate, text)
    logprobs = scores.list_logprobs(each.name for each in asked.candidates)
    logprobs[SERVER] = assessment.logprobs
    result = finish(request, asked, report, logprobs, reporter, hashes)
    served = compare_served(asked.candidates, scores, text.lengths) if request.decode else ()
    return ServerVerifyResult(**dict(result), server=assessment.result, served=served)


def _gather(
    asked: Verification,
    scores: Scores,
    model: PreparedModel | StreamedModel,
    faults: Mapping[str, Fault],
    reporter: Reporter,
) -> ServerEvidence:
    """Gather what the server is compared with."""
    runner = FaultRunner(
        model=model,
        candidates=asked.candidates,
        plan=asked.plan,
        batch_size=asked.batch_size,
        progress=reporter,
    )
    names = [*(candidate.name for candidate in asked.candidates), *faults]
    return ServerEvidence(
        reference=scores.reference.logprobs,
        watched=scores.reference.watched,
        candidates={name: changes_of(scores, name) for name in names},
        has_scales=bool(runner.faults),
        faults=faults,
        runner=runner,
    )


def _compare_alone(
    request: ServerRequest, asked: Verification, servers: Servers, reporter: Reporter
) -> ServerVerifyResult:
    """Compare the server with a dump, or with an unquantized server: nothing is emulated here."""
    dump = None if request.reference_dump is None else Path(request.reference_dump)
    evidence = gather_alone(asked.plan, dump)
    started = time.monotonic()
    text, answers = servers.ask(asked.plan, None, reporter)
    assessment = assess(answers, evidence, text.sequences)
    report, logprobs = report_alone(
        asked.model,
        asked.numerics.name,
        assessment,
        asked.gate or GATES["kv"],
        text,
        time.monotonic() - started,
    )
    result = finish(request, replace(asked, plan=text), report, logprobs, reporter)
    return ServerVerifyResult(**dict(result), server=assessment.result)


def describe(result: ServerVerifyResult, request: ServerRequest) -> Iterator[Block]:
    """Describe what explains the server, among the other candidates."""
    yield from describe_verification(result, request, _describe_server(result))


def _describe_server(result: ServerVerifyResult) -> Iterator[Block]:
    found = result.server
    yield Line()
    title = (
        f"what explains the server's changes, {found.change_rms:.4f} nats (root mean square; "
        f"{found.noise_rms:.2g} from one scoring to the next)"
    )
    rows = [
        [
            each.candidate,
            "-" if each.correlation is None else f"{each.correlation:.3f}",
            f"{each.residual_rms:.4f}",
        ]
        for each in found.explanations
    ]
    if rows:
        columns = ["candidate", "correlation", "left, nats"]
        yield Table(title=title, columns=columns, rows=rows)
    for name, estimate in (
        ("KLD of the server, low variance (q/p - 1 - log q/p)", found.kld_low_variance),
        ("KLD of the server, log p/q", found.kld_log_ratio),
        ("KLD of the server, from its most likely tokens", found.kld_top),
        ("KLD of the server, at least", found.kld_at_least),
    ):
        if estimate is not None:
            yield Line(f"  {name}: {format_mean_kld(estimate.value, estimate.se)}")
    if found.engine is not None and found.engine.change_rms is not None:
        yield Line(
            f"  the unquantized {found.engine.kind} server differs from the model here by "
            f"{found.engine.change_rms:.4f} nats, perplexity ratio {found.engine.ppl_ratio:.4f}"
        )
    if found.decoding is not None:
        yield Line(f"  {found.decoding.tokens:,} tokens that the server wrote:")
        yield Line(f"    {found.decoding.sentence}")
    if found.repeated_requests:
        yield Line(
            f"  requests sent again, as a server was slow or busy: {found.repeated_requests}"
        )
    if result.served:
        yield Line()
        yield _tabulate_served(result.served)
        yield from (Line(f"  {each.sentence}") for each in result.served)


def _tabulate_served(results: Sequence[ServedResult]) -> Table:
    """Make the table of what decoding changes."""
    rows = [
        [
            each.candidate,
            format_mean_kld(each.prompt_kld, each.prompt_kld_se),
            format_mean_kld(each.decode_kld, each.decode_kld_se),
            describe_pair(each.difference),
        ]
        for each in results
    ]
    return Table(
        title=f"the second half of each sequence, {results[0].tokens:,} tokens: as a prompt, and "
        "decoded after a prompt",
        columns=["candidate", "KLD as a prompt ± se", "KLD decoded ± se", "decoding"],
        rows=rows,
        words=(0, 3),
    )


server = as_function("server", ServerRequest, run)
