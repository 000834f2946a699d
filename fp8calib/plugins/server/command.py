"""Compare a running server with the emulated candidates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.commands.model import open_run_model
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import RunPlan
from fp8calib.commands.verify_run import (
    check_request,
    complete_report,
    describe_plan,
    finish,
    open_verification,
)
from fp8calib.commands.verify_run import describe as describe_verification
from fp8calib.data.sequences import DataPlan
from fp8calib.data.sources import split_data
from fp8calib.errors import UsageError
from fp8calib.machine import PeakMemory
from fp8calib.plugins.server.alone import check_dump, read_dump, report_alone
from fp8calib.plugins.server.ask import ask_servers, check_text, open_servers, require_memory
from fp8calib.plugins.server.assess import ServerEvidence, add_server, assess
from fp8calib.plugins.server.faults import changes_of, has_scaled_kv, list_query_faults
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import SERVER, ServedResult, ServerVerifyResult
from fp8calib.plugins.server.score import Server
from fp8calib.plugins.server.served import compare_served, list_served
from fp8calib.text import Block, Line, Table
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.tables import describe_pair, format_mean_kld
from fp8calib.verification.token_scores import split_sequences
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
        servers: Sequence[Server] = ()

        def change_text(text: DataPlan) -> DataPlan:
            nonlocal servers
            check_text(request, text)
            if not request.dry_run:
                text, servers = open_servers(request, model.source, text, reporter.say)
            return text

        asked = open_verification(request, model, specs, rows, change_text)
        for note in asked.warnings:
            reporter.warn(note)
        faults = list_query_faults(asked.candidates)
        others = [replace(fault.emulation, name=name) for name, fault in faults.items()]
        if request.decode and not asked.numerics.prompt_reads_cache:
            others += list_served(asked.candidates)
        asked = replace(asked, others=tuple(others))
        if servers and request.reference_dump is not None:
            return _compare_alone(request, asked, servers, reporter)
        try:
            mode = plan_verification(
                asked, Path(request.dump or request.report or "none").absolute().parent
            )
            require_memory(request, mode)
        except UsageError as error:
            if not servers or request.reference_server is None:
                raise
            reporter.warn(f"nothing is emulated here: {error.message}")
            return _compare_alone(request, asked, servers, reporter)
        if not servers:
            return describe_plan(asked, mode)
        for note in (*mode.describe(), model.describe()):
            reporter.say(note)
        with PeakMemory() as peak, open_scored(asked, mode, reporter) as scored:
            writer = None if isinstance(scored, StreamedModel) else scored.model
            text, answers = ask_servers(servers, asked.plan, writer, reporter)
            top_ids = answers.scores.top_ids
            watched = list(split_sequences(top_ids, text.lengths)) if top_ids.shape[1] else None
            asked = replace(asked, plan=text, watched=watched)
            asked, report, scores = run_verification(asked, scored, reporter)
            names = [each.name for each in asked.candidates]
            evidence = ServerEvidence(
                reference=scores.reference.logprobs,
                watched=scores.reference.watched,
                candidates={name: changes_of(scores, name) for name in (*names, *faults)},
                has_scales=any(map(has_scaled_kv, asked.candidates)),
                faults=faults,
                model=scored,
            )
            gate = asked.gate or GATES[asked.candidates[0].default_gate]
            server, row = assess(answers, evidence, asked, gate, reporter)
    report = complete_report(asked, report, scores, request, model, mode, peak, specs)
    for note in report.warnings:
        reporter.warn(note)
    report = add_server(report, server, row)
    logprobs = {"reference": scores.reference.logprobs, SERVER: answers.scores.logprobs}
    logprobs |= {name: scores.candidates[name].logprobs for name in names}
    result = finish(request, asked, report, logprobs, reporter)
    served = compare_served(asked.candidates, scores, text.lengths) if request.decode else ()
    return ServerVerifyResult(**dict(result), server=server, served=served)


def _compare_alone(
    request: ServerRequest, asked: Verification, servers: Sequence[Server], reporter: Reporter
) -> ServerVerifyResult:
    """Compare the server with a dump, or with an unquantized server: nothing is emulated here."""
    evidence = ServerEvidence(
        reference=None, watched=None, candidates={}, has_scales=False, faults={}
    )
    if request.reference_dump is not None:
        evidence = read_dump(Path(request.reference_dump), asked.plan)
    started = time.monotonic()
    text, answers = ask_servers(servers, asked.plan, None, reporter)
    asked = replace(asked, plan=text)
    reference = answers.choose_reference(evidence.reference)
    report = report_alone(asked, reference, time.monotonic() - started)
    server, row = assess(answers, evidence, asked, asked.gate or GATES["kv"], reporter)
    report = add_server(report, server, row)
    logprobs = {"reference": reference, SERVER: answers.scores.logprobs}
    result = finish(request, asked, report, logprobs, reporter)
    return ServerVerifyResult(**dict(result), server=server)


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
