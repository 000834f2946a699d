"""Compare a model, on a path or in memory, with its FP8 emulation on the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8calib.api.calibrate import fields_of
from fp8calib.api.models import Placement, RunModel, open_run_model
from fp8calib.api.progress import CallbackProgress, ProgressCallback, warn_each
from fp8calib.api.saved import ModelOrPath
from fp8calib.api.text import TextData, plan_text, split_data
from fp8calib.api.verify.job import AskServer, TaskJob, VerifyJob, VerifyOptions
from fp8calib.api.verify.loadable import warn_of_refusals
from fp8calib.api.verify.memory import choose_verification_mode, open_reference
from fp8calib.api.verify.request import build_request
from fp8calib.calibration import Progress
from fp8calib.data.plan import FEW_TOKENS, DataPlan
from fp8calib.data.rows import Row
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import FP8_FORMATS, Fp8Format
from fp8calib.fp8.schemes import Scheme, find_scheme
from fp8calib.geometry.sites import Role
from fp8calib.machine.memory import PeakMemory
from fp8calib.model.live_model import LiveCheckpoint
from fp8calib.model.load import ModelSource, load_tokenizer
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.stored_parameters import list_leftovers
from fp8calib.run.planning.whole_or_streamed import MemoryMode
from fp8calib.scales.rules import Rule, parse_rule
from fp8calib.stats.calibration_origin import estimate_overlap
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.fingerprint import fingerprint_model, versions
from fp8calib.verification.candidates import (
    OpenedCandidate,
    Target,
    find_candidate,
    open_candidate,
    open_stats,
)
from fp8calib.verification.judge.gates import load_gate
from fp8calib.verification.report import SCALE_ONE, SERVER, RunProvenance, VerifyReport
from fp8calib.verification.tasks.lm_eval import run_tasks
from fp8calib.verification.tasks.task_files import open_tasks, require_harness
from fp8calib.verification.verify import (
    ReferenceModel,
    VerificationRequest,
    VerificationResult,
    list_emulations,
)
from fp8calib.verification.verify import verify as compare

_SMALLEST_SHARE = 0.01
_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, SERVER, "__metadata__"})
Scales = str | Path | CalibrationStats
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""


def verify(
    model: ModelOrPath,
    scales: Scales | Iterable[Scales] = (),
    data: TextData | None = None,
    *,
    engine: str = "vllm",
    scheme: str | None = None,
    rules: Sequence[str] = (),
    sensitivity: bool = False,
    fp8_dtype: str = "e4m3fn",
    samples: int = 512,
    seq_len: int | None = None,
    batch_size: int = 1,
    pack: bool = True,
    gate: str | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    memory: float | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Compare a model with its FP8 emulation on the same text; `passed` of the report is the gate.

    A model in memory keeps its parameters, hooks, caches and modes. Where a candidate quantizes
    weights, they are replaced while it runs, and copied before that to the memory of the host.

    Args:
        model: a folder, a Hub id, or a `PreTrainedModel` that is in memory.
        scales: what to compare; none for scale 1.0 alone.
        data: as for `calibrate`; None is the built-in text that `calibrate` does not use.
        engine: the engine to emulate, such as `vllm` or `sglang`.
        scheme: emulate the weights and inputs of this scheme, not the KV cache.
        rules: scale rules to rank, such as `amax` and `percentile:99.99`.
        sensitivity: also quantize one layer at a time.
        fp8_dtype: the FP8 format of statistics and of scale 1.0.
        samples: how many sequences.
        seq_len: tokens of a sequence; None is 2048, or the model's maximum.
        batch_size: sequences of a forward pass.
        pack: whether rows are joined and cut into sequences.
        gate: `kv`, `w8a8` or a file; None judges each candidate by its own kind.
        tasks: tasks of lm-evaluation-harness.
        limit: the most documents of a task.
        device: as for `calibrate`, like the following options.
        dtype: of the forward pass.
        device_map: `auto` spreads the model over all GPUs.
        memory: the most memory of the process, in GiB.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the Python code of the checkpoint.
        tokenizer: for texts and tasks; None takes the one in the model's folder.
        progress: called with stage, steps done and all steps.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model or a candidate cannot be read, or do not belong together.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity.
    """
    options = resolve_options(
        (scales,) if isinstance(scales, Scales) else tuple(scales),
        engine=engine,
        scheme=scheme,
        rules=rules,
        sensitivity=sensitivity,
        fp8_dtype=fp8_dtype,
        batch_size=batch_size,
        gate=gate,
        tasks=tasks,
        limit=limit,
    )
    specs, rows = split_data(data)
    text = VerificationText(
        specs=specs, rows=rows, samples=samples, seq_len=seq_len, pack=pack, tokenizer=tokenizer
    )
    placement = Placement(device=device, dtype=dtype, device_map=device_map, memory=memory)
    reports = CallbackProgress(progress)
    with open_run_model(
        model,
        placement,
        revision=revision,
        trust_remote_code=trust_remote_code,
        if_quantized=if_quantized(str(model)),
    ) as found:
        job = open_verify_job(found, options, text)
        report = run_verify_job(job, choose_verification_mode(job), reports).report
    warn_each(report.warnings)
    return report


def resolve_options(
    scales: Sequence[Scales],
    *,
    engine: str,
    scheme: str | None,
    rules: Sequence[str],
    sensitivity: bool,
    fp8_dtype: str,
    batch_size: int,
    gate: str | None,
    tasks: Sequence[str],
    limit: int | None,
    with_faults: bool = False,
    writes_text: bool = False,
    with_histograms: bool = False,
    scratch: Path | None = None,
) -> VerifyOptions:
    """Check the options that need no model, and resolve their names.

    Raises:
        UsageError: an option is invalid, or names something unknown.
        ModelError: a candidate's folder links to files outside of it.
    """
    names = [str(item) for item in scales if not isinstance(item, CalibrationStats)]
    _check_candidate_names(names)
    _check_task_options(tasks, limit)
    known, numerics = find_emulated(engine)
    return VerifyOptions(
        scales=tuple(i if isinstance(i, CalibrationStats) else str(i) for i in scales),
        engine=known,
        numerics=numerics,
        scheme=None if scheme is None else find_scheme(scheme),
        rules=_parse_rules(rules),
        fmt=_find_format(fp8_dtype),
        gate=None if gate is None else load_gate(gate),
        sensitivity=sensitivity,
        batch_size=batch_size,
        tasks=tuple(tasks),
        limit=limit,
        with_faults=with_faults,
        writes_text=writes_text,
        with_histograms=with_histograms,
        scratch=scratch or Path.cwd(),
    )


def if_quantized(name: str) -> str:
    """Say what to do instead of verifying a quantized model that cannot be decoded."""
    return f"pass the model it was made from as MODEL, and this one as --scales {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationText:
    """The text of a verification, not yet read."""

    specs: Sequence[str]
    rows: Iterable[Row] | None = None
    """Read instead of the specs."""
    samples: int
    seq_len: int | None
    pack: bool
    tokenizer: Any = None
    """None: that in the model's folder."""
    planned: DataPlan | None = None
    """Used as it is, instead of all others."""

    def plan(self, source: ModelSource) -> DataPlan:
        """Read the text; the warnings are about figures, not about scales.

        Raises:
            UsageError: the length is above the model's maximum, or a data spec is invalid.
            DataError: the data cannot be read.
        """
        if self.planned is not None:
            return self.planned
        plan = plan_text(
            source,
            specs=self.specs,
            rows=self.rows,
            samples=self.samples,
            seq_len=self.seq_len,
            pack=self.pack,
            seed=0,
            part="verify",
            tokenizer=self.tokenizer,
        )
        warnings = (text for text in plan.warnings if "scales may miss" not in text)
        few = f"only {plan.num_tokens} tokens, fewer than {FEW_TOKENS}: the figures are imprecise"
        is_few = plan.num_tokens < FEW_TOKENS
        return replace(plan, warnings=(*warnings, *((few,) if is_few else ())))


def open_verify_job(
    model: RunModel,
    options: VerifyOptions,
    text: VerificationText,
    *,
    connect: Callable[[ModelSource, DataPlan], tuple[AskServer, DataPlan]] | None = None,
) -> VerifyJob:
    """Open the candidates and the text, and refuse what cannot be emulated before loading weights.

    `connect` connects to a server, and gives the part of the text that it can score.

    Raises:
        UsageError: options contradict each other.
        DataError: the text cannot be read.
        ModelError: a candidate cannot be read or emulated, or belongs to another model.
    """
    target = Target(
        checkpoint=model.checkpoint,
        fingerprint=fingerprint_model(model.source.raw_config, model.checkpoint.stored),
        geometry=model.prepared.geometry,
    )
    opened = tuple(_open_candidates(options, target))
    plan, server = text.plan(model.source), None
    if connect is not None:
        server, plan = connect(model.source, plan)
    job = VerifyJob(
        **fields_of(model),
        options=options,
        target=target,
        opened=opened,
        plan=plan,
        server=server,
        task_job=_open_tasks(model, options, text.tokenizer),
        warnings=(
            *model.describe_decoded(),
            *_warn_of_leftovers(model.name, model.prepared),
            *_warn_of_overlap(plan, opened),
            *_warn_of_ignored_kv(options.scheme, opened),
            *warn_of_refusals(options, model, opened),
        ),
    )
    build_request(job, model.prepared.model)
    return job


def run_verify_job(
    job: VerifyJob, mode: MemoryMode, progress: Progress, *, command: str = ""
) -> VerificationResult:
    """Run the comparison and the tasks of a job; `command` is the command line of the run.

    Raises:
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity, or weights cannot be replaced.
    """
    with PeakMemory() as peak, _open_held(job, mode, progress) as (reference, comparison):
        request = build_request(job, reference.model)
        plan, answers = job.plan, None
        if job.server is not None:
            model = None if mode.streaming else reference.model
            plan, answers = job.server(plan, model, progress)
        verified = compare(
            reference,
            request,
            plan,
            batch_size=job.options.batch_size,
            progress=progress,
            comparison=comparison,
            server=answers,
        )
        if job.task_job is not None:
            verified = _add_tasks(job, job.task_job, reference, request, verified, progress)
    memory = {**mode.as_json(), "peak_measured_bytes": peak.peak_bytes}
    provenance = RunProvenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        model_hash=job.target.fingerprint,
        data_hash=verified.data,
        versions=versions(),
    )
    return _change_report(verified, memory=memory, provenance=provenance)


@contextmanager
def _open_held(job: VerifyJob, mode: MemoryMode, progress: Progress) -> Iterator[Any]:
    """Open the model; of one in memory, copy the weights that candidates replace."""
    if isinstance(job.checkpoint, LiveCheckpoint):
        emulations = list_emulations(build_request(job, job.prepared.model))
        if any(each.weights for each in emulations.values()):
            job.checkpoint.hold()
    with open_reference(job, mode, progress) as opened:
        yield opened


def _change_report(verified: VerificationResult, **fields: Any) -> VerificationResult:
    return replace(verified, report=verified.report.model_copy(update=fields))


def _add_tasks(
    job: VerifyJob,
    task_job: TaskJob,
    reference: ReferenceModel,
    request: VerificationRequest,
    verified: VerificationResult,
    progress: Progress,
) -> VerificationResult:
    outcome = run_tasks(
        reference,
        request.candidates,
        task_job.tasks,
        task_job.tokenizer,
        batch_size=job.options.batch_size,
        progress=progress,
    )
    return _change_report(
        verified,
        tasks=outcome.rows,
        task_setup=outcome.setup,
        warnings=(*verified.report.warnings, *outcome.warnings),
    )


# --- options --------------------------------------------------------------------------------------


def _check_candidate_names(names: Sequence[str]) -> None:
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"--scales {name!r}: must be a path of printable characters")
        if name in _RESERVED_NAMES:
            raise UsageError(f"--scales {name}: this name is reserved", hint=f"write ./{name}")
    places = [find_candidate(name).resolve() for name in names]
    for place in places:
        if places.count(place) > 1:
            twice = " and ".join(n for n, p in zip(names, places, strict=True) if p == place)
            raise UsageError(f"--scales {twice}: the same scales twice", hint="give them once")


def _check_task_options(tasks: Sequence[str], limit: int | None) -> None:
    if not all(tasks):
        raise UsageError("--tasks: empty name", hint="give tasks as NAME,NAME")
    if tasks:
        require_harness()
    elif limit is not None:
        raise UsageError("--limit has no effect without --tasks", hint="add --tasks NAME")


def _find_format(name: str) -> Fp8Format:
    if name not in FP8_FORMATS:
        raise UsageError(
            f"--fp8-dtype {name}: unknown format", hint=f"known: {', '.join(FP8_FORMATS)}"
        )
    return FP8_FORMATS[name]


def _parse_rules(names: Sequence[str]) -> tuple[Rule, ...]:
    if not all(names):
        raise UsageError("--rules: empty name", hint="give rules as NAME,NAME")
    rules = tuple(map(parse_rule, names))
    for rule in rules:
        if rules.count(rule) > 1:
            raise UsageError(f"--rules: {rule} is given twice", hint="name each rule once")
    return rules


# --- candidates and warnings ----------------------------------------------------------------------


def _open_candidates(options: VerifyOptions, target: Target) -> Iterator[OpenedCandidate]:
    for index, item in enumerate(options.scales):
        if isinstance(item, CalibrationStats):
            yield open_stats("statistics" if not index else f"statistics-{index}", item, target)
        else:
            yield open_candidate(item, target, options.numerics)


def _open_tasks(model: RunModel, options: VerifyOptions, tokenizer: Any) -> TaskJob | None:
    if not options.tasks:
        return None
    if tokenizer is None:
        tokenizer = load_tokenizer(model.source, int(model.source.text_config.vocab_size))
    return TaskJob(tasks=open_tasks(options.tasks, limit=options.limit), tokenizer=tokenizer)


def _warn_of_leftovers(name: str, found: PreparedModel) -> Iterator[str]:
    if leftovers := list_leftovers(found.model, found.weights):
        yield f"{name}: not parameters of the model, so not loaded: {', '.join(leftovers)}"


def _warn_of_overlap(plan: DataPlan, opened: tuple[OpenedCandidate, ...]) -> Iterator[str]:
    text = plan.text.distinctive()
    for candidate in opened:
        measured = candidate.origin
        share = 0.0 if measured is None else estimate_overlap(text, measured.text)
        if share:
            about = f"about {share:.0%}" if share >= _SMALLEST_SHARE else "less than 1%"
            yield (
                f"{candidate.name}: {about} of this text was used for calibration, so its "
                "figures are too good"
            )


def _warn_of_ignored_kv(
    scheme: Scheme | None, opened: tuple[OpenedCandidate, ...]
) -> Iterator[str]:
    for candidate in opened if scheme is not None else ():
        sites = () if candidate.stats is None else candidate.stats.sites
        if any(site.role is Role.K for site in sites):
            yield (
                f"{candidate.name}: its KV scales are ignored, as --scheme quantizes weights and "
                "inputs only; leave out --scheme to verify them"
            )
