"""The servers of a verification: connect before the run, score during the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8calib.data.sequences import DataPlan, replace_sequences
from fp8calib.errors import ModelError, UsageError
from fp8calib.jobs.verification.job import AskServer, VerifyJob
from fp8calib.machine.progress import Progress
from fp8calib.model.load import LoadedModel, ModelSource, load_tokenizer
from fp8calib.requests.verify import VerifyRequest
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.sensitivity import SEQUENCES
from fp8calib.verification.server.assess import ServerAnswers, ServerEvidence, assess
from fp8calib.verification.server.client import RequestCount, find_endpoint
from fp8calib.verification.server.decoding import DecodingAnswers
from fp8calib.verification.server.recognise import require_kind
from fp8calib.verification.server.row import report_alone
from fp8calib.verification.server.score import ConnectedServer, ServerOptions, connect
from fp8calib.verification.server.written import count_given, write_text
from fp8calib.verification.verify import VerificationResult

_SERVER_KEY = "FP8CALIB_SERVER_KEY"
"""The environment variable with the API key of --server."""
_REFERENCE_KEY = "FP8CALIB_REFERENCE_SERVER_KEY"
"""The same for --reference-server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Servers:
    """Servers that are ready to score the text."""

    server: ConnectedServer
    reference: ConnectedServer | None
    request: VerifyRequest

    def ask(
        self, plan: DataPlan, model: LoadedModel | None, progress: Progress
    ) -> tuple[DataPlan, ServerAnswers]:
        """Let the servers score the text, and --server its first sequences again.

        With --sampled, the unquantized model, here (`model`) or in a server, writes the text first.

        Raises:
            ServerError: a server fails.
            VerificationError: the model gives NaN or inf.
        """
        plan = self._write_sampled(plan, model, progress)

        server, every = self.server, plan.sequences
        few = every[:SEQUENCES]

        def ask_decoding() -> DecodingAnswers:
            """Let --server write, then score what it wrote, each twice for the first sequences."""
            decoded = server.decode(every, progress, stage="letting the server write")
            again = server.decode(few, progress, stage="letting it write again")
            written = tuple(each.ids for each in decoded)
            scores = server.score(written, progress, stage="asking about what it wrote")
            stage = "asking about what it wrote again"
            scores_again = server.score(written[:SEQUENCES], progress, stage=stage)
            return DecodingAnswers(
                decoded=decoded, again=again, scores=scores, scores_again=scores_again
            )

        return plan, ServerAnswers(
            scores=server.score(every, progress, stage="asking the server"),
            again=server.score(few, progress, stage="asking the server again"),
            reference=None
            if self.reference is None
            else self.reference.score(every, progress, stage="asking the unquantized server"),
            decoding=ask_decoding() if self.request.decode else None,
            num_given=count_given(every) if self.request.sampled else None,
            repeated=sum(
                one.options.count.repeated
                for one in (self.server, self.reference)
                if one is not None
            ),
        )

    def _write_sampled(
        self, plan: DataPlan, model: LoadedModel | None, progress: Progress
    ) -> DataPlan:
        if not self.request.sampled:
            return plan
        if (one := self.reference) is not None:
            return replace_sequences(plan, one.write(plan.sequences, progress))
        assert model is not None  # noqa: S101 -- the plan holds it whole
        return replace_sequences(plan, write_text(model, plan.sequences, progress))


def connect_all(
    request: VerifyRequest, source: ModelSource, plan: DataPlan, say: Callable[[str], None]
) -> tuple[AskServer, DataPlan]:
    """Connect to --server and --reference-server; give the plan with what could not be checked.

    `say` gets notes on the connection while it is used.

    Raises:
        UsageError: a URL or the kind is invalid, or both servers are one.
        ServerError: a server fails.
        ModelError: it has another model.
    """
    assert request.server is not None  # noqa: S101 -- the caller looked
    require_kind(request.server_kind)
    tokenizer = request.tokenizer or _load_tokenizer(source)

    def open_one(
        option: str, url: str, key: str, model: str | None, kind: str | None
    ) -> ConnectedServer:
        options = ServerOptions(
            endpoint=find_endpoint(option, url, key),
            model=model,
            kind=kind,
            likely_kind=request.server_kind,
            num_top=request.server_logprobs,
            concurrency=request.server_concurrency,
            timeout_s=request.server_timeout,
            count=RequestCount(say=say),
        )
        vocab_size = int(source.text_config.vocab_size)
        return connect(options, plan.sequences, tokenizer, vocab_size=vocab_size)

    url, name = request.reference_server, request.reference_server_model
    server = open_one(
        "--server", request.server, _SERVER_KEY, request.server_model, request.server_kind
    )
    reference = (
        None if url is None else open_one("--reference-server", url, _REFERENCE_KEY, name, None)
    )
    both = [server] if reference is None else [server, reference]
    if len({(one.options.endpoint.url, one.server.model) for one in both}) < len(both):
        raise UsageError(
            f"--reference-server: {server.options.endpoint.url} is --server itself",
            hint="name a server of the unquantized model, or --reference-server-model",
        )
    servers = _Servers(server=server, reference=reference, request=request)
    notes = (one.server.note for one in both if one.server.note)
    return servers.ask, replace(plan, warnings=(*plan.warnings, *notes))


def run_alone(job: VerifyJob, evidence: ServerEvidence, progress: Progress) -> VerificationResult:
    """Compare the server with the evidence, without running the model.

    Raises:
        ServerError: a server fails.
        ModelError: it has another model.
    """
    assert job.server is not None  # noqa: S101 -- checked with the options
    started = time.monotonic()
    plan, answers = job.server(job.plan, None, progress)
    assessment = assess(answers, replace(evidence, sequences=plan.sequences))
    report, logprobs = report_alone(
        job.name,
        job.options.numerics.name,
        assessment,
        job.options.gate or GATES["kv"],
        plan,
        time.monotonic() - started,
    )
    return VerificationResult(report=report, logprobs=logprobs, data=plan.fingerprint)


def _load_tokenizer(source: ModelSource) -> Any | None:
    """Load the model's tokenizer; None where data of token ids needs none and there is none."""
    try:
        return load_tokenizer(source)
    except ModelError:
        return None
