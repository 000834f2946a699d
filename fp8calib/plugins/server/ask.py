"""The servers of a comparison: connected before a weight is read, asked before the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.locations import require_path
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.data.sequences import DataPlan, replace_sequences
from fp8calib.errors import DataError, ModelError, UsageError, shorten
from fp8calib.model.load import LoadedModel, ModelSource, load_tokenizer
from fp8calib.plugins.server.assess import ServerAnswers, ServerEvidence
from fp8calib.plugins.server.client import Endpoint, find_endpoint
from fp8calib.plugins.server.decoding import DecodingAnswers
from fp8calib.plugins.server.faults import SEQUENCES
from fp8calib.plugins.server.model_text import count_given, write_text
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import SERVER
from fp8calib.plugins.server.score import Server, connect
from fp8calib.plugins.server.server_kinds import KINDS
from fp8calib.verification.report import SCALE_ONE

_SERVER_KEY = "FP8CALIB_SERVER_KEY"
"""The environment variable with the API key of the server."""
_REFERENCE_KEY = "FP8CALIB_REFERENCE_SERVER_KEY"
"""The same for --reference-server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The server, and the unquantized one if it is named."""

    server: Server
    reference: Server | None

    def ask(
        self, plan: DataPlan, model: LoadedModel | None, progress: Progress
    ) -> tuple[DataPlan, ServerAnswers]:
        """Let the servers score the text, and the server its first sequences again.

        With --sampled, the unquantized model, here (`model`) or in a server, writes the text first.

        Raises:
            ServerError: a server fails.
            VerificationError: the model gives NaN or inf.
        """
        server, reference, request = self.server, self.reference, self.server.request
        if request.sampled and reference is not None:
            plan = replace_sequences(plan, reference.write(plan.sequences, progress))
        elif request.sampled:
            assert model is not None  # noqa: S101 -- a streamed one is refused before it runs
            plan = replace_sequences(plan, write_text(model, plan.sequences, progress))
        every, few = plan.sequences, plan.sequences[:SEQUENCES]
        scores = server.score(every, progress, stage="asking the server")
        again = server.score(few, progress, stage="asking the server again")
        unquantized, repeated = None, 0
        if reference is not None:
            stage = "asking the unquantized server"
            unquantized = reference.score(every, progress, stage=stage)
            repeated = reference.count.repeated
        return plan, ServerAnswers(
            scores=scores,
            again=again,
            reference=unquantized,
            decoding=_ask_decoding(server, every, progress) if request.decode else None,
            num_given=count_given(every) if request.sampled else None,
            repeated=repeated + server.count.repeated,
        )


def explain_streaming(request: ServerRequest) -> UsageError | None:
    """Say why the model must be in memory whole; None if it need not be."""
    if not request.sampled or request.reference_server is not None:
        return None
    return UsageError(
        "--sampled: the model does not fit into memory, and a streamed one cannot write: "
        "every generated token would read all weights again",
        hint="name an unquantized server that writes (--reference-server), or use a machine "
        "(or a larger --memory) that holds the model",
    )


def open_servers(
    request: ServerRequest, source: ModelSource, plan: DataPlan, say: Callable[[str], None]
) -> tuple[DataPlan, Servers]:
    """Connect to the servers; give the plan with what could not be checked.

    `say` gets notes on the connection while it is used.

    Raises:
        UsageError: a URL or the kind is invalid, both servers are one, or rows have media.
        ServerError: a server fails.
        ModelError: it has another model.
    """
    tokenizer = request.tokenizer
    if tokenizer is None:
        with suppress(ModelError):  # data of token ids needs none, and there may be none
            tokenizer = load_tokenizer(source)

    def open_one(endpoint: Endpoint, model: str | None, kind: str | None) -> Server:
        vocab_size = int(source.text_config.vocab_size)
        asked = (request, endpoint, (model, kind), plan.sequences, tokenizer)
        return connect(*asked, vocab_size=vocab_size, say=say)

    endpoint = find_endpoint("URL", request.url, _SERVER_KEY)
    server, reference = open_one(endpoint, request.server_model, request.server_kind), None
    if (url := request.reference_server) is not None:
        other = find_endpoint("--reference-server", url, _REFERENCE_KEY)
        reference = open_one(other, request.reference_server_model, None)
        if (other.url, reference.model) == (endpoint.url, server.model):
            raise UsageError(
                f"--reference-server: {endpoint.url} is the server itself",
                hint="name a server of the unquantized model, or --reference-server-model",
            )
    notes = [one.note for one in (server, reference) if one is not None and one.note]
    plan = replace(plan, warnings=(*plan.warnings, *notes))
    return plan, Servers(server=server, reference=reference)


def check_text(request: ServerRequest, plan: DataPlan) -> None:
    """Refuse rows with media, and text that no server can be asked about.

    Raises:
        UsageError: there are such rows, or the kind of server is unknown.
    """
    if plan.media:
        kinds = " and ".join(list(plan.tokens_by_modality)[1:])
        raise UsageError(
            f"server: the data has {kinds}, and this takes text alone", hint="use rows of text"
        )
    if request.server_kind not in {None, *KINDS}:
        known = f"known: {', '.join(KINDS)}"
        raise UsageError(f"--server-kind {request.server_kind}: unknown", hint=known)
    if request.decode and max(plan.lengths) <= 2:
        hint = "use longer text, or a larger --seq-len"
        raise UsageError("--decode: no sequence is longer than 2 tokens", hint=hint)


def _ask_decoding(
    server: Server, every: Sequence[torch.Tensor], progress: Progress
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
    """Refuse a dump that cannot be read.

    Raises:
        UsageError: there is none, or the text of the comparison is not that of a dump.
        ModelError: the file is no dump.
    """
    if request.reference_dump is None:
        return
    dump = Path(request.reference_dump)
    require_path(dump, option="--reference-dump")
    read_header(dump)  # before the server is asked
    if request.sampled:
        raise UsageError(
            "--sampled: a dump has other text than what the model would write here",
            hint="leave out --sampled, or --reference-dump",
        )


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
        reference=reference,
        watched=None,
        candidates=changes,
        has_scales=any(name != SCALE_ONE for name in changes),
        faults={},
    )


def _read_dump(path: Path, plan: DataPlan) -> dict[str, torch.Tensor]:
    with TensorFile(path) as file:
        found = {name: file.read(name) for name in file.tensors}
        metadata = file.metadata
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
