"""How `verify` fits a model into memory: whole, or layer by layer; decided before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8calib.cli.verify.candidates import build_question
from fp8calib.cli.verify.job import VerifyJob
from fp8calib.data.plan import Batch, batches
from fp8calib.errors import UsageError
from fp8calib.geometry.sites import Role
from fp8calib.model.dtype import DTYPES
from fp8calib.model.load import LoadedModel, build_skeleton, load_model
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.planning.footprint import Workload
from fp8calib.run.planning.limits import find_limits, refuse_device_map
from fp8calib.run.planning.plan import RunPlan, Streamable, describe_run, plan_whole
from fp8calib.run.planning.stream_plan import StreamPlanner, plan_streamed
from fp8calib.run.streaming.model import Streaming
from fp8calib.run.streaming.probe import Probe
from fp8calib.verification.compare.streamed import StreamedComparison, open_streamed_comparison
from fp8calib.verification.compare.token_scores import scoring_bytes
from fp8calib.verification.compare.whole import Comparing
from fp8calib.verification.emulation.emulate import Emulation
from fp8calib.verification.sensitivity import choose_batches, split_rounds
from fp8calib.verification.verify import Question, Subject, list_emulations


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyMode:
    """How the model of a job is run."""

    plan: RunPlan | None
    """None where --device-map spreads it: nothing is planned then."""
    model: LoadedModel
    """Without weights; in the dtype it computes in, where it is streamed."""
    streaming: Streaming | None = None
    """None: whole."""

    def as_json(self) -> Mapping[str, Any]:
        """Give what `--json` says of it."""
        return {"streamed": False} if self.plan is None else self.plan.as_json()


def choose_mode(job: VerifyJob) -> VerifyMode:
    """Choose between a model in memory whole and one that is streamed.

    Raises:
        UsageError: it fits in neither way, or has to be streamed and is asked what only a whole
            one can answer.
    """
    settings = job.settings
    if settings.device_map is not None:
        refuse_device_map(settings.memory)
        return VerifyMode(plan=None, model=job.skeleton)
    limits = find_limits(job.choices.device, settings.memory)
    found = list(batches(job.plan, settings.batch_size))
    question = build_question(job, job.skeleton)
    subject = _describe(job, job.skeleton, question, found)
    scratch = _scratch_folder(job)
    if (whole := plan_whole(subject, limits, scratch)) is not None:
        return VerifyMode(plan=whole, model=job.skeleton)
    model = build_skeleton(job.source, dtype=DTYPES[job.dtype])
    planner = plan_streamed(
        _describe(job, model, question, found),
        limits,
        dtype=DTYPES[job.dtype],
        device=job.choices.device,
        scratch=scratch,
    )
    return _stream(job, model, planner, found)


def describe_mode(mode: VerifyMode) -> Iterator[str]:
    """Say how the model will be run."""
    if mode.plan is not None:
        yield from describe_run(mode.plan)


@contextmanager
def open_subject(job: VerifyJob, mode: VerifyMode) -> Iterator[tuple[Subject, Comparing | None]]:
    """Load the model, or make it ready to be streamed, with how it is then compared."""
    if mode.streaming is None:
        model = load_model(
            job.source,
            dtype=DTYPES[job.dtype],
            device=job.choices.device,
            device_map=job.settings.device_map,
        )
        yield _subject(job, model), None
    else:
        with _open_comparison(job, mode.model, mode.streaming) as comparison:
            yield _subject(job, mode.model), comparison


def _subject(job: VerifyJob, model: LoadedModel) -> Subject:
    return Subject(
        name=job.settings.model,
        model=model,
        geometry=job.target.geometry,
        originals=WeightSource(model, job.checkpoint),
        dtype=job.dtype,
        device=job.choices.device,
    )


@contextmanager
def _open_comparison(
    job: VerifyJob, model: LoadedModel, streaming: Streaming
) -> Iterator[StreamedComparison]:
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *job.plan.sequences])
    with open_streamed_comparison(
        model,
        job.target.geometry,
        WeightSource(model, job.checkpoint),
        job.checkpoint,
        tokens,
        streaming,
    ) as comparison:
        yield comparison


def _describe(
    job: VerifyJob, model: LoadedModel, question: Question, found: list[Batch]
) -> Streamable:
    emulations = list_emulations(question)
    distinct = torch.unique(torch.cat(list(job.plan.sequences)))
    roles = {site.role for each in emulations.values() for site in each.quantizers}
    work = replace(
        Workload.of(found, len(distinct) + 1),
        num_models=len(emulations) + 1,
        changes_weights=any(each.weights for each in emulations.values()),
        changes_inputs=Role.INPUT in roles,
    )
    itemsize = DTYPES[job.dtype].itemsize
    device = torch.device(job.choices.device)
    vocab_size = int(job.source.text_config.vocab_size)
    return Streamable(
        model=model,
        geometry=job.target.geometry,
        checkpoint=job.checkpoint,
        weights=WeightSource(model, job.checkpoint),
        work=work,
        itemsize=itemsize,
        extra={},
        logits_bytes=scoring_bytes(
            device,
            vocab_size,
            itemsize,
            num_tokens=max(batch.input_ids.numel() for batch in found),
        ),
    )


def _stream(
    job: VerifyJob, model: LoadedModel, planner: StreamPlanner, found: list[Batch]
) -> VerifyMode:
    if job.settings.tasks:
        raise UsageError(
            f"--tasks {','.join(job.settings.tasks)}: the model has to be streamed, and would be "
            "read anew for every word that a task lets it write",
            hint="leave out --tasks, or give it a machine (or --memory) that holds it whole",
        )
    plan = planner.plan()
    emulations = list_emulations(build_question(job, model))
    largest = max(found, key=lambda batch: batch.input_ids.numel())
    probe = _probe(job, model, _streaming(job, plan), largest, emulations)
    walks = tuple(_further_walks(job, model, found, len(emulations) + 1))
    plan = planner.plan(probe, further_walks=walks)
    return VerifyMode(plan=plan, model=model, streaming=_streaming(job, plan))


def _probe(
    job: VerifyJob,
    model: LoadedModel,
    streaming: Streaming,
    batch: Batch,
    emulations: Mapping[str, Emulation],
) -> Probe:
    with _open_comparison(job, model, streaming) as comparison:
        return comparison.probe(batch, emulations)


def _further_walks(
    job: VerifyJob, model: LoadedModel, found: list[Batch], num_models: int
) -> Iterator[float]:
    """Give the share of the first walk's work that each round of --sensitivity adds."""
    candidate = build_question(job, model).sensitivity_of
    if candidate is None:
        return
    chosen = choose_batches(job.plan, job.settings.batch_size)
    tokens = sum(b.input_ids.numel() for b in chosen) / sum(b.input_ids.numel() for b in found)
    for layers in split_rounds(job.target.geometry, candidate.emulation):
        yield tokens * (len(layers) + 1) / num_models


def _streaming(job: VerifyJob, plan: RunPlan) -> Streaming:
    return Streaming(
        dtype=DTYPES[job.dtype],
        device=job.choices.device,
        hidden_ram_bytes=plan.hidden_ram_bytes,
        scratch=plan.scratch,
    )


def _scratch_folder(job: VerifyJob) -> Path:
    """Give the folder of what is written, or the current one where nothing is."""
    outputs = [path for path in (job.settings.dump, job.settings.report) if path is not None]
    return outputs[0].absolute().parent if outputs else Path.cwd()
