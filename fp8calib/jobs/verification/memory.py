"""What a verification needs in memory, and the mode that follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fp8calib.data.sequences import Batch, batches
from fp8calib.geometry.sites import Role
from fp8calib.jobs.verification.job import VerifyJob
from fp8calib.jobs.verification.request import build_request
from fp8calib.machine.progress import Progress
from fp8calib.model.dtype import DTYPES
from fp8calib.model.prepared import PreparedModel
from fp8calib.run.memory_plan.footprint import Workload
from fp8calib.run.memory_plan.limits import find_limits
from fp8calib.run.memory_plan.plan import PlanInputs
from fp8calib.run.memory_plan.whole_or_streamed import MemoryMode, choose_memory_mode
from fp8calib.run.streaming.model import Streaming, open_streamed
from fp8calib.run.streaming.probe import Probe
from fp8calib.verification.compare.comparison import Comparison
from fp8calib.verification.compare.streamed import StreamedComparison
from fp8calib.verification.compare.text_runs import split_rounds
from fp8calib.verification.compare.token_scores import scoring_bytes
from fp8calib.verification.sensitivity import split_by_layer
from fp8calib.verification.verify import (
    ReferenceModel,
    VerificationRequest,
    list_emulations,
)

_SEARCH_WALKS = 2
"""`--rules auto` chooses on half of the text, and judges on the other."""


def choose_verification_mode(
    job: VerifyJob,
    *,
    always_streams: str = "",
    extra_bytes: Mapping[str, int] | None = None,
) -> MemoryMode:
    """Choose between a model in memory whole and one that is streamed.

    `always_streams` says why it is streamed in any case; `extra_bytes` is further memory, by what
    needs it.

    Raises:
        UsageError: it fits in neither way, or it has to be streamed and --sampled is given.
    """
    if job.is_placed:
        return MemoryMode(plan=None, prepared=job.prepared)
    found = list(batches(job.plan, job.options.request.batch_size))
    request = build_request(job, job.prepared.model)

    def probe(prepared: PreparedModel, streaming: Streaming) -> Probe:
        largest = max(found, key=lambda batch: batch.input_ids.numel())
        with _open_comparison(job, prepared, streaming) as comparison:
            return comparison.probe(largest, list_emulations(build_request(job, prepared.model)))

    return choose_memory_mode(
        replace(_describe_run(job, request, found), extra=extra_bytes or {}),
        find_limits(job.device, job.memory),
        source=job.source,
        scratch=job.options.scratch,
        probe=probe,
        cannot_stream=None if job.companion is None else job.companion.cannot_stream,
        walks=_count_walks(job, request),
        always_streams=always_streams,
    )


@contextmanager
def open_reference(
    job: VerifyJob, mode: MemoryMode, progress: Progress
) -> Iterator[tuple[ReferenceModel, Comparison | None]]:
    """Load the model whole, or open it for streaming; None is the comparison of a whole model."""
    prepared = job.load(mode, progress)
    reference = ReferenceModel(
        name=job.name,
        model=prepared.model,
        geometry=prepared.geometry,
        originals=prepared.weights,
        dtype=job.dtype,
        device=job.device,
    )
    if mode.streaming is None:
        yield reference, None
    else:
        with _open_comparison(job, prepared, mode.streaming) as comparison:
            yield reference, comparison


@contextmanager
def _open_comparison(
    job: VerifyJob, prepared: PreparedModel, streaming: Streaming
) -> Iterator[StreamedComparison]:
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *job.plan.sequences])
    with open_streamed(prepared, job.checkpoint, tokens, streaming) as streamed:
        yield StreamedComparison(streamed)


def _describe_run(
    job: VerifyJob, request: VerificationRequest, found: Sequence[Batch]
) -> PlanInputs:
    emulations = list_emulations(request)
    roles = {site.role for each in emulations.values() for site in each.quantizers}
    dtype = DTYPES[job.dtype]
    return PlanInputs(
        prepared=job.prepared,
        checkpoint=job.checkpoint,
        work=replace(
            Workload.of(found),
            num_models=len(emulations) + 1,
            changes_weights=any(each.weights for each in emulations.values()),
            changes_inputs=Role.INPUT in roles,
        ),
        dtype=dtype,
        device=job.device,
        extra={},
        logits_bytes=scoring_bytes(
            torch.device(job.device),
            int(job.source.text_config.vocab_size),
            dtype.itemsize,
            num_tokens=max(batch.input_ids.numel() for batch in found),
        ),
    )


def _count_walks(job: VerifyJob, request: VerificationRequest) -> int:
    """Count how often all layers are read."""
    rounds, candidate = 0, request.sensitivity_of
    if candidate is not None:
        layers = split_by_layer(job.target.geometry, candidate.emulation)
        rounds = len(list(split_rounds(list(layers))))
    searches = _SEARCH_WALKS if request.rule_search is not None else 0
    return 1 + request.measures_noise + rounds + searches
