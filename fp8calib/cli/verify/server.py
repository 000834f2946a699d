"""The server of `fp8calib verify --server`: connect before the run, score during the run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration import Progress
from fp8calib.cli.verify.settings import SERVER_KEY, VerifySettings
from fp8calib.data.plan import DataPlan
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.load import ModelSource, load_tokenizer
from fp8calib.verification.sensitivity import SEQUENCES
from fp8calib.verification.server.assess import ServerAnswers
from fp8calib.verification.server.client import find_endpoint
from fp8calib.verification.server.kind import ServerScores
from fp8calib.verification.server.recognise import Server, require_kind
from fp8calib.verification.server.score import ServerOptions, ServerText, connect, score


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerJob:
    """A server that is ready to score the text."""

    options: ServerOptions
    server: Server
    tokenizer: Any | None
    resume: bool


def open_server(
    settings: VerifySettings, source: ModelSource, plan: DataPlan
) -> tuple[ServerJob, DataPlan]:
    """Connect to the server of --server; give the part of the plan that it can score.

    Raises:
        UsageError: the URL or the kind is invalid, or a server that takes text can score nothing.
        VerificationError: the server fails.
        ModelError: it has another model.
    """
    assert settings.server is not None  # noqa: S101 -- the caller asked
    require_kind(settings.server_kind)
    options = ServerOptions(
        endpoint=find_endpoint("--server", settings.server, SERVER_KEY),
        model=settings.server_model,
        kind=settings.server_kind,
        num_top=settings.server_logprobs,
        concurrency=settings.server_concurrency,
        timeout_s=settings.server_timeout,
    )
    tokenizer = _load_tokenizer(source)
    server = connect(options, plan.sequences, tokenizer)
    if not server.kind.takes_ids:
        plan = _keep_spelled(plan, tokenizer, server)
    job = ServerJob(options=options, server=server, tokenizer=tokenizer, resume=settings.resume)
    return job, replace(plan, warnings=(*plan.warnings, *((server.note,) if server.note else ())))


def ask_server(job: ServerJob, plan: DataPlan, progress: Progress) -> ServerAnswers:
    """Let the server score the text, and its first sequences again.

    Raises:
        VerificationError: the server fails.
    """
    return ServerAnswers(
        scores=_score(job, plan.sequences, progress, "asking the server"),
        again=_score(job, plan.sequences[:SEQUENCES], progress, "asking the server again"),
    )


def _score(
    job: ServerJob, sequences: tuple[torch.Tensor, ...], progress: Progress, stage: str
) -> ServerScores:
    digest = hashlib.sha256(stage.encode())
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little") + sequence.numpy().tobytes())
    text = ServerText(sequences=sequences, fingerprint=digest.hexdigest(), tokenizer=job.tokenizer)
    return score(
        job.options,
        job.server,
        text,
        progress,
        folder=Path.cwd(),
        resume=job.resume,
        stage=stage,
    )


def _load_tokenizer(source: ModelSource) -> Any | None:
    """Load the model's tokenizer; None where data of token ids needs none and there is none."""
    try:
        return load_tokenizer(source, int(source.text_config.vocab_size))
    except ModelError:
        return None


def _keep_spelled(plan: DataPlan, tokenizer: Any | None, server: Server) -> DataPlan:
    """Keep the sequences that a server reads back from their text."""
    kept = tuple(
        sequence
        for sequence in plan.sequences
        if tokenizer is not None
        and list(tokenizer(tokenizer.decode(sequence.tolist()))["input_ids"]) == sequence.tolist()
    )
    lost = len(plan.sequences) - len(kept)
    if not kept:
        raise UsageError(
            f"--server: {server.kind.name} takes text, and the tokenizer reads none of the "
            f"{lost} sequences back from their text",
            hint="use --no-pack, so that every sequence is a text of its own",
        )
    if not lost:
        return plan
    note = f"{lost} of {lost + len(kept)} sequences are not used: {server.kind.name} takes text"
    return replace(
        plan,
        sequences=kept,
        warnings=(*plan.warnings, f"{note}, and the tokenizer does not read them back from it"),
    )
