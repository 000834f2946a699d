"""The servers of a verification: connect before the run, score during the run, compare after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.locations import require_path
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.data.sequences import DataPlan, replace_sequences
from fp8calib.errors import DataError, ModelError, UsageError, shorten
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.verification.job import VerifyJob
from fp8calib.jobs.verification.memory import choose_verification_mode
from fp8calib.jobs.verification.run_job import require_text
from fp8calib.machine.progress import Progress
from fp8calib.model.load import LoadedModel, ModelSource, load_tokenizer
from fp8calib.plugins.server.assess import Assessment, ServerAnswers, ServerEvidence, assess
from fp8calib.plugins.server.client import RequestCount, find_endpoint
from fp8calib.plugins.server.decoding import DecodingAnswers
from fp8calib.plugins.server.faults import SEQUENCES, FaultRunner, changes_of, list_faults
from fp8calib.plugins.server.hypotheses import Fault
from fp8calib.plugins.server.recognise import require_kind
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import SERVER, ServerResult
from fp8calib.plugins.server.row import add_server, report_alone
from fp8calib.plugins.server.score import ConnectedServer, ServerOptions, connect
from fp8calib.plugins.server.written import count_given, write_text
from fp8calib.requests.shared import SKIP_LAYERS
from fp8calib.verification.companion import ComparedText
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.judge.gates import GATES, Gate
from fp8calib.verification.report import SCALE_ONE, VerifyReport
from fp8calib.verification.verify import VerificationResult

Value = TypeVar("Value")
_SERVER_KEY = "FP8CALIB_SERVER_KEY"
"""The environment variable with the API key of the server."""
_REFERENCE_KEY = "FP8CALIB_REFERENCE_SERVER_KEY"
"""The same for --reference-server."""


class ServerCompanion:
    """The servers that score the text of a verification: connected before it, asked during it."""

    def __init__(self, request: ServerRequest) -> None:
        self.request = request
        self._server: ConnectedServer | None = None
        self._reference: ConnectedServer | None = None
        self._answers: ServerAnswers | None = None
        self._faults: Mapping[str, Fault] = {}
        self._assessment: Assessment | None = None

    @property
    def result(self) -> ServerResult:
        """What the comparison found."""
        return self._require(self._assessment).result

    @property
    def cannot_stream(self) -> UsageError | None:
        """Why the model must be in memory whole; None if it need not be."""
        if not self.request.sampled or self.request.reference_server is not None:
            return None
        return UsageError(
            "--sampled: the model does not fit into memory, and a streamed one cannot write: "
            "every generated token would read all weights again",
            hint="name an unquantized server that writes (--reference-server), or use a machine "
            "(or a larger --memory) that holds the model",
        )

    def connect(self, source: ModelSource, plan: DataPlan, say: Callable[[str], None]) -> DataPlan:
        """Connect to the servers; give the plan with what could not be checked.

        `say` gets notes on the connection while it is used.

        Raises:
            UsageError: a URL or the kind is invalid, both servers are one, or rows have media.
            ServerError: a server fails.
            ModelError: it has another model.
        """
        request = self.request
        require_text(plan, "server")
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
        self._server = open_one(
            "URL", request.url, _SERVER_KEY, request.server_model, request.server_kind
        )
        if url is not None:
            self._reference = open_one("--reference-server", url, _REFERENCE_KEY, name, None)
        both = self._list_servers()
        if len({(one.options.endpoint.url, one.server.model) for one in both}) < len(both):
            raise UsageError(
                f"--reference-server: {both[0].options.endpoint.url} is the server itself",
                hint="name a server of the unquantized model, or --reference-server-model",
            )
        notes = (one.server.note for one in both if one.server.note)
        return replace(plan, warnings=(*plan.warnings, *notes))

    def compare_alone(self, job: VerifyJob, reporter: Reporter) -> VerificationResult | None:
        """Compare with a dump, or with an unquantized server where the model cannot be run.

        Raises:
            UsageError: nothing is emulated, and there is nothing to compare with.
            ServerError: a server fails.
            ModelError: the dump cannot be read.
            DataError: the dump is of another text.
        """
        dump = self.request.reference_dump
        if dump is None:
            if self.request.reference_server is None or self.request.dry_run:
                return None
            try:
                choose_verification_mode(job)
            except UsageError as error:
                reporter.warn(f"nothing is emulated here: {error.message}")
            else:
                return None
        evidence = gather_alone(job.plan, None if dump is None else Path(dump))
        started = time.monotonic()
        plan = self.begin(job.plan, None, reporter)
        self._assessment = assess(
            self._require(self._answers), replace(evidence, sequences=plan.sequences)
        )
        report, logprobs = report_alone(
            job.name,
            job.options.numerics.name,
            self._assessment,
            job.options.gate or GATES["kv"],
            plan,
            time.monotonic() - started,
        )
        return VerificationResult(report=report, logprobs=logprobs, data=plan.fingerprint)

    def begin(self, plan: DataPlan, model: LoadedModel | None, progress: Progress) -> DataPlan:
        """Let the servers score the text, and the server its first sequences again.

        With --sampled, the unquantized model, here (`model`) or in a server, writes the text first.

        Raises:
            ServerError: a server fails.
            VerificationError: the model gives NaN or inf.
        """
        plan = self._write_sampled(plan, model, progress)
        server, reference = self._require(self._server), self._reference
        every, few = plan.sequences, plan.sequences[:SEQUENCES]
        self._answers = ServerAnswers(
            scores=server.score(every, progress, stage="asking the server"),
            again=server.score(few, progress, stage="asking the server again"),
            reference=None
            if reference is None
            else reference.score(every, progress, stage="asking the unquantized server"),
            decoding=_ask_decoding(server, every, progress) if self.request.decode else None,
            num_given=count_given(every) if self.request.sampled else None,
            repeated=sum(one.options.count.repeated for one in self._list_servers()),
        )
        return plan

    def list_emulations(self, candidates: Sequence[Candidate]) -> Mapping[str, Candidate]:
        """List the faults that run beside the candidates."""
        self._faults = list_faults(candidates)
        return {name: fault.emulation for name, fault in self._faults.items()}

    @property
    def watched(self) -> Sequence[torch.Tensor] | None:
        """The tokens that the server names."""
        return self._require(self._answers).watched

    def compare(self, text: ComparedText) -> None:
        """Find what explains the server's answers."""
        runner = FaultRunner(
            model=text.model,
            candidates=text.candidates,
            plan=text.plan,
            batch_size=text.batch_size,
            progress=text.progress,
        )
        names = [*(candidate.name for candidate in text.candidates), *self._faults]
        evidence = ServerEvidence(
            sequences=text.plan.sequences,
            reference=text.compared.reference.logprobs,
            watched=text.compared.reference.watched,
            candidates={name: changes_of(text.compared, name) for name in names},
            has_scales=bool(runner.bases),
            faults=self._faults,
            layer_faults=runner,
        )
        self._assessment = assess(self._require(self._answers), evidence)

    def complete(
        self, report: VerifyReport, gate: Gate, plan: DataPlan
    ) -> tuple[VerifyReport, Mapping[str, torch.Tensor]]:
        """Add the server to the candidates, and its log-probabilities to the dump."""
        assessment = self._require(self._assessment)
        return add_server(report, assessment, gate, plan), {SERVER: assessment.logprobs}

    def _list_servers(self) -> list[ConnectedServer]:
        return [one for one in (self._server, self._reference) if one is not None]

    def _require(self, value: Value | None) -> Value:
        if value is None:
            raise RuntimeError("the steps of a comparison run in order")
        return value

    def _write_sampled(
        self, plan: DataPlan, model: LoadedModel | None, progress: Progress
    ) -> DataPlan:
        if not self.request.sampled:
            return plan
        if self._reference is not None:
            return replace_sequences(plan, self._reference.write(plan.sequences, progress))
        return replace_sequences(plan, write_text(self._require(model), plan.sequences, progress))


def _ask_decoding(
    server: ConnectedServer, every: Sequence[torch.Tensor], progress: Progress
) -> DecodingAnswers:
    """Let the server write, then score what it wrote, each twice for the first sequences."""
    decoded = server.decode(every, progress, stage="letting the server write")
    again = server.decode(every[:SEQUENCES], progress, stage="letting it write again")
    written = tuple(each.ids for each in decoded)
    scores = server.score(written, progress, stage="asking about what it wrote")
    stage = "asking about what it wrote again"
    scores_again = server.score(written[:SEQUENCES], progress, stage=stage)
    return DecodingAnswers(decoded=decoded, again=again, scores=scores, scores_again=scores_again)


def check_dump(request: ServerRequest) -> None:
    """Refuse a dump that cannot be read, and options that have no effect beside one.

    Raises:
        UsageError: naming the option.
        ModelError: the file is no dump.
    """
    if request.reference_dump is None:
        return
    dump = Path(request.reference_dump)
    require_path(dump, option="--reference-dump")
    read_header(dump)  # before the server is asked
    ignored = {
        "--scales": request.scales,
        "--scheme": request.scheme,
        "--rules": request.rules,
        SKIP_LAYERS: request.kv_cache_dtype_skip_layers,
        "--dry-run": request.dry_run,
        "--sampled": request.sampled,
    }
    if found := [option for option, value in ignored.items() if value]:
        raise UsageError(
            f"{found[0]} has no effect with --reference-dump: nothing is computed here",
            hint=f"give {found[0]} to the run that wrote the dump",
        )


def _load_tokenizer(source: ModelSource) -> Any | None:
    """Load the model's tokenizer; None where data of token ids needs none and there is none."""
    try:
        return load_tokenizer(source)
    except ModelError:
        return None


def gather_alone(plan: DataPlan, dump: Path | None) -> ServerEvidence:
    """Gather what a server is compared with where nothing runs here: a dump, or nothing.

    Raises:
        ModelError: the dump cannot be read.
        DataError: it is of another text, or damaged.
    """
    logprobs = {} if dump is None else _read_dump(dump, plan)
    reference = logprobs.pop("reference", None)
    logprobs.pop(SERVER, None)
    changes = {
        name: (each - reference).double()
        for name, each in logprobs.items()
        if reference is not None
    }
    return ServerEvidence(
        sequences=plan.sequences,
        reference=reference,
        watched=None,
        candidates=changes,
        has_scales=any(name != SCALE_ONE for name in changes),
        faults={},
    )


def _read_dump(path: Path, plan: DataPlan) -> dict[str, torch.Tensor]:
    with TensorFile(path) as file:
        found = {name: file.read(name) for name in file.tensors}
        metadata = file.header.metadata
    if "reference" not in found:
        raise DataError(
            f"{path}: holds no reference",
            hint="name a file that `fp8calib verify --dump FILE` wrote",
        )
    broken = next((name for name in found if not bool(found[name].isfinite().all())), None)
    if broken is not None:
        raise DataError(
            f"{path}: damaged: {shorten(broken)} has NaN or infinity", hint="write it again"
        )
    num_scored = sum(length - 1 for length in plan.lengths)
    sizes = {tuple(each.shape) for each in found.values()}
    if sizes != {(num_scored,)} or metadata.get("data") != plan.fingerprint:
        raise DataError(
            f"{path}: of another text: it has {len(found['reference'])} tokens, this one "
            f"{num_scored}",
            hint="use the same --data, --samples, --seq-len and tokenizer as that run",
        )
    return found
