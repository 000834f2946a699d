"""The servers of a comparison: connected before a weight is read, asked before the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.progress import Progress
from fp8calib.data.sequences import DataPlan
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.load import LoadedModel, ModelSource, load_tokenizer
from fp8calib.plugins.server.answers import ServerScores
from fp8calib.plugins.server.client import ServerClient
from fp8calib.plugins.server.decoding import assess_decoding
from fp8calib.plugins.server.faults import SEQUENCES
from fp8calib.plugins.server.model_text import count_given, write_text
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import ServerDecodeResult
from fp8calib.plugins.server.score import Server, connect
from fp8calib.plugins.server.server_kinds import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """What servers answered about the text."""

    servers: Sequence[Server]
    """The server, then the unquantized one if it is named."""
    scores: ServerScores
    again: ServerScores
    """The same server, about the first sequences once more."""
    reference: ServerScores | None
    """The unquantized server."""
    num_given: int | None
    """How many tokens begin every sequence, if the unquantized model wrote the rest."""
    decoding: ServerDecodeResult | None
    """With --decode: what the server wrote itself."""

    def choose_reference(self, model: torch.Tensor | None) -> torch.Tensor:
        """Choose what the server is compared with: the unquantized one, else `model`: fp32 [N]."""
        chosen = model if self.reference is None else self.reference.logprobs
        assert chosen is not None  # noqa: S101 -- there is a model or a server
        return chosen


def check_text(request: ServerRequest, plan: DataPlan) -> None:
    """Refuse rows with media, and text that no server can be asked about."""
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


def open_servers(
    request: ServerRequest, source: ModelSource, plan: DataPlan, say: Callable[[str], None]
) -> tuple[DataPlan, Sequence[Server]]:
    """Connect to the servers; give the plan with what could not be checked.

    `say` gets notes on the connection while it is used.
    """
    tokenizer = request.tokenizer
    if tokenizer is None:
        with suppress(ModelError):  # data of token ids needs none, and there may be none
            tokenizer = load_tokenizer(source)
    shared = (
        plan.sequences,
        tokenizer,
        int(source.config.get_text_config(decoder=True).vocab_size),
    )
    client = ServerClient("URL", request.url, "FP8CALIB_SERVER_KEY", say)
    servers = [connect(request, client, request.server_model, request.server_kind, *shared)]
    if (url := request.reference_server) is not None:
        other = ServerClient("--reference-server", url, "FP8CALIB_REFERENCE_SERVER_KEY", say)
        servers.append(connect(request, other, request.reference_server_model, None, *shared))
        if len({(server.client.url, server.model) for server in servers}) == 1:
            raise UsageError(
                f"--reference-server: {client.url} is the server itself",
                hint="name a server of the unquantized model, or --reference-server-model",
            )
    notes = [server.note for server in servers if server.note]
    return replace(plan, warnings=(*plan.warnings, *notes)), servers


def require_memory(request: ServerRequest, mode: MemoryPlan) -> None:
    """Refuse a model that has to write, and is streamed."""
    if mode.is_streamed and request.sampled and request.reference_server is None:
        raise UsageError(
            "--sampled: the model does not fit into memory, and a streamed one cannot write: "
            "every generated token would read all weights again",
            hint="name an unquantized server that writes (--reference-server), or use a machine "
            "(or a larger --memory) that holds the model",
        )


def ask_servers(
    servers: Sequence[Server], plan: DataPlan, model: LoadedModel | None, progress: Progress
) -> tuple[DataPlan, ServerAnswers]:
    """Let the servers score the text, and the first one its first sequences again.

    With --sampled, the unquantized model, here (`model`) or in a server, writes the text first.
    """
    server, *others = servers
    request = server.request
    if request.sampled and others:
        written = others[0].write(plan.sequences, progress, stage="writing text", is_drawn=True)
        plan = replace(plan, sequences=tuple(each.ids for each in written), media={})
    elif request.sampled:
        assert model is not None  # noqa: S101 -- a streamed one is refused before it runs
        texts = write_text(model, plan.sequences, progress)
        plan = replace(plan, sequences=tuple(texts), media={})
    every, few = plan.sequences, plan.sequences[:SEQUENCES]
    scores = server.score(every, progress, stage="asking the server")
    again = server.score(few, progress, stage="asking the server again")
    reference = None
    if others:
        reference = others[0].score(every, progress, stage="asking the unquantized server")
    return plan, ServerAnswers(
        servers=servers,
        scores=scores,
        again=again,
        reference=reference,
        num_given=count_given(every) if request.sampled else None,
        decoding=_ask_decoding(server, every, progress) if request.decode else None,
    )


def _ask_decoding(
    server: Server, every: Sequence[torch.Tensor], progress: Progress
) -> ServerDecodeResult:
    """Let the server write, then score what it wrote, each twice for the first sequences."""
    few = every[:SEQUENCES]
    written = server.write(every, progress, stage="letting the server write", is_drawn=False)
    again = server.write(few, progress, stage="letting it write again", is_drawn=False)
    ids = [each.ids for each in written]
    scores = server.score(ids, progress, stage="asking about what it wrote")
    few = ids[:SEQUENCES]
    repeated = server.score(few, progress, stage="asking about what it wrote again")
    return assess_decoding(written, again, scores.logprobs, repeated.logprobs)
