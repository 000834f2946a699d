"""The servers of `fp8calib verify`: connect before the run, score during the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8calib.calibration import Progress
from fp8calib.cli.verify.settings import REFERENCE_KEY, SERVER_KEY, VerifySettings
from fp8calib.data.plan import DataPlan, replace_sequences
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.load import LoadedModel, ModelSource, load_tokenizer
from fp8calib.verification.sensitivity import SEQUENCES
from fp8calib.verification.server.assess import ServerAnswers
from fp8calib.verification.server.client import find_endpoint
from fp8calib.verification.server.kinds.kind import ServerScores
from fp8calib.verification.server.partial import KeptAnswers
from fp8calib.verification.server.recognise import Server, require_kind
from fp8calib.verification.server.score import (
    ServerOptions,
    ServerText,
    connect,
    score,
    spell_out,
    write,
)
from fp8calib.verification.server.written import count_given, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connected:
    options: ServerOptions
    server: Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerJob:
    """Servers that are ready to score the text."""

    server: _Connected
    reference: _Connected | None
    tokenizer: Any | None
    kept: KeptAnswers
    is_sampled: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be checked."""
        both = (self.server, self.reference)
        return tuple(one.server.note for one in both if one is not None and one.server.note)


def open_servers(
    settings: VerifySettings, source: ModelSource, plan: DataPlan, kept: KeptAnswers
) -> tuple[ServerJob, DataPlan]:
    """Connect to --server and --reference-server; give the part of the plan that they can score.

    Raises:
        UsageError: a URL or the kind is invalid, or a server that takes text can score nothing.
        VerificationError: a server fails.
        ModelError: it has another model.
    """
    assert settings.server is not None  # noqa: S101 -- the caller asked
    require_kind(settings.server_kind)
    tokenizer = _load_tokenizer(source)

    def open_one(
        option: str, url: str, key: str, model: str | None, kind: str | None
    ) -> _Connected:
        options = ServerOptions(
            endpoint=find_endpoint(option, url, key),
            model=model,
            kind=kind,
            likely_kind=settings.server_kind,
            num_top=settings.server_logprobs,
            concurrency=settings.server_concurrency,
            timeout_s=settings.server_timeout,
        )
        return _Connected(options=options, server=connect(options, plan.sequences, tokenizer))

    reference = settings.reference_server
    job = ServerJob(
        server=open_one(
            "--server", settings.server, SERVER_KEY, settings.server_model, settings.server_kind
        ),
        reference=None
        if reference is None
        else open_one(
            "--reference-server", reference, REFERENCE_KEY, settings.reference_server_model, None
        ),
        tokenizer=tokenizer,
        kept=kept,
        is_sampled=settings.sampled,
    )
    usable, lost = _keep_spelled(job, plan)
    return job, replace(usable, warnings=(*plan.warnings, *job.notes, *lost))


def _keep_spelled(job: ServerJob, plan: DataPlan) -> tuple[DataPlan, tuple[str, ...]]:
    """Keep the sequences that servers can score; give the plan, and warnings."""
    both = [one.server.kind for one in (job.server, job.reference) if one is not None]
    name = next((kind.name for kind in both if not kind.takes_ids), None)
    if name is None:
        return plan, ()
    kept = [
        sequence
        for sequence in plan.sequences
        if spell_out(sequence.tolist(), job.tokenizer) is not None
    ]
    lost = len(plan.sequences) - len(kept)
    if not kept:
        raise UsageError(
            f"--server: {name} takes text, and the tokenizer reads none of the {lost} sequences "
            "back from their text",
            hint="use --no-pack, so that every sequence is a text of its own",
        )
    if not lost:
        return plan, ()
    note = f"{lost} of {lost + len(kept)} sequences are not used: {name} takes text"
    return replace_sequences(plan, kept), (f"{note}, and they are not read back from theirs",)


def _write_sampled(
    job: ServerJob, plan: DataPlan, model: LoadedModel | None, progress: Progress
) -> DataPlan:
    if not job.is_sampled:
        return plan
    if job.reference is not None:
        one = job.reference
        text = ServerText(
            sequences=plan.sequences, fingerprint=plan.fingerprint, tokenizer=job.tokenizer
        )
        written = write(one.options, one.server, text, progress, kept=job.kept)
        return replace_sequences(plan, written)
    assert model is not None  # noqa: S101 -- the plan holds it whole
    return replace_sequences(plan, write_text(model, plan.sequences, progress))


def ask_servers(
    job: ServerJob, plan: DataPlan, model: LoadedModel | None, progress: Progress
) -> tuple[DataPlan, ServerAnswers]:
    """Let the servers score the text, and --server its first sequences again.

    With --sampled, the unquantized model, here (`model`) or in a server, writes the text first.

    Raises:
        VerificationError: a server fails, or the model gives NaN or inf.
    """
    plan = _write_sampled(job, plan, model, progress)

    def ask(one: _Connected, sequences: tuple[torch.Tensor, ...], stage: str) -> ServerScores:
        text = ServerText(
            sequences=sequences,
            fingerprint=f"{plan.fingerprint} {stage} {len(sequences)}",
            tokenizer=job.tokenizer,
        )
        return score(one.options, one.server, text, progress, kept=job.kept, stage=stage)

    every = plan.sequences
    return plan, ServerAnswers(
        scores=ask(job.server, every, "asking the server"),
        again=ask(job.server, every[:SEQUENCES], "asking the server again"),
        reference=None
        if job.reference is None
        else ask(job.reference, every, "asking the unquantized server"),
        num_given=count_given(every) if job.is_sampled else None,
    )


def _load_tokenizer(source: ModelSource) -> Any | None:
    """Load the model's tokenizer; None where data of token ids needs none and there is none."""
    try:
        return load_tokenizer(source, int(source.text_config.vocab_size))
    except ModelError:
        return None
