"""The report of a server as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.commands._verify import describe as describe_verification
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import ServedResult, ServerVerifyResult
from fp8calib.text import Block, Line, Table
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import describe_pair


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
