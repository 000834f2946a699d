"""What a verification needs in memory, and the reference that runs in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from fp8calib.data.sequences import batches
from fp8calib.geometry.sites import Role
from fp8calib.jobs.verification.job import VerifyJob
from fp8calib.jobs.verification.request import build_request
from fp8calib.machine.progress import Progress
from fp8calib.model.dtype import DTYPES
from fp8calib.run.memory_plan import MemoryPlan, Workload, find_limits, plan_memory
from fp8calib.run.streaming.model import open_streamed
from fp8calib.verification.emulation.probabilities import attending_bytes
from fp8calib.verification.token_scores import scoring_bytes
from fp8calib.verification.verify import ReferenceModel, list_emulations


def choose_verification_mode(
    job: VerifyJob,
    *,
    always_streams: str = "",
    extra_bytes: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Choose between a model in memory whole and one that is streamed.

    `always_streams` says why it is streamed in any case; `extra_bytes` is further memory, by what
    needs it.

    Raises:
        UsageError: it fits in neither way, or it has to be streamed and --sampled is given.
    """
    if job.is_placed:
        return MemoryPlan(prepared=job.prepared)
    found = list(batches(job.plan, job.options.request.batch_size))
    request = build_request(job, job.prepared.model)
    emulations = list_emulations(request)
    logits = scoring_bytes(
        torch.device(job.device),
        int(job.source.text_config.vocab_size),
        DTYPES[job.dtype].itemsize,
        num_tokens=max(batch.input_ids.numel() for batch in found),
    )
    extra = dict(extra_bytes or {})
    roles = {site.role for each in emulations for site in each.quantizers}
    if Role.P in roles:
        heads = [attention.num_heads for _, attention in job.target.geometry.attentions()]
        length = max(batch.input_ids.shape[1] for batch in found)
        extra["attention in fp32"] = attending_bytes(torch.device(job.device), max(heads), length)
    return plan_memory(
        Workload(
            source=job.source,
            prepared=job.prepared,
            checkpoint=job.checkpoint,
            dtype=DTYPES[job.dtype],
            device=job.device,
            batches=found,
            scratch=job.options.scratch,
            extra=extra,
            logits_bytes=logits,
            num_models=len(emulations) + 1,
            changes_weights=any(each.weights for each in emulations),
            changes_inputs=Role.INPUT in roles,
            walks=1 + request.measures_noise,
            always_streams=always_streams,
        ),
        find_limits(job.device, job.memory),
        cannot_stream=None if job.companion is None else job.companion.cannot_stream,
    )


@contextmanager
def open_reference(
    job: VerifyJob, mode: MemoryPlan, progress: Progress
) -> Iterator[ReferenceModel]:
    """Load the model whole, or open it for streaming."""
    prepared = job.load(mode, progress)
    reference = ReferenceModel(
        name=job.name,
        model=prepared,
        dtype=job.dtype,
        device=job.device,
    )
    if mode.streaming is None:
        yield reference
        return
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *job.plan.sequences])
    with open_streamed(prepared, job.checkpoint, tokens, mode.streaming) as streamed:
        yield replace(reference, model=streamed)
