"""Compare a model, on a path or in memory, with its FP8 emulation on the same text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8calib.api.verify.alone import run_alone
from fp8calib.api.verify.comparison import VerificationText, open_verify_job, run_verify_job
from fp8calib.api.verify.dump import gather_alone
from fp8calib.api.verify.job import ServerRequest, VerifyOptions
from fp8calib.api.verify.memory import choose_mode_beside
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import E4M3FN, FP8_FORMATS, Fp8Format
from fp8calib.fp8.schemes import find_scheme
from fp8calib.jobs.arguments import checked
from fp8calib.jobs.models import Placement, open_run_model
from fp8calib.jobs.progress import CallbackProgress, warn_each
from fp8calib.jobs.rows import split_data
from fp8calib.requests.shared import Model, ProgressCallback, TextData
from fp8calib.results.calibrate import CalibrateResult
from fp8calib.scales.rules import Rule, parse_rule
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import (
    find_candidate,
)
from fp8calib.verification.judge.gates import load_gate
from fp8calib.verification.report import SCALE_ONE, SERVER, VerifyReport
from fp8calib.verification.tasks.task_files import require_harness

_RESERVED_NAMES = frozenset({"reference", SCALE_ONE, SERVER, "__metadata__"})
Scales = str | Path | CalibrationStats | CalibrateResult
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""


@checked
def verify(
    model: Model,
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
    text_column: str | None = None,
    gate: str | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    server: str | None = None,
    server_model: str | None = None,
    server_kind: str | None = None,
    server_logprobs: int = 1,
    server_concurrency: int = 4,
    server_timeout: float = 600.0,
    sampled: bool = False,
    reference_server: str | None = None,
    reference_server_model: str | None = None,
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
        text_column: as for `calibrate`.
        gate: `kv`, `w8a8` or a file; None judges each candidate by its own kind.
        tasks: tasks of lm-evaluation-harness.
        limit: the most documents of a task.
        server: URL of a running vLLM, SGLang or TGI server to score too; its API key is in the
            variable FP8CALIB_SERVER_KEY.
        server_model: the model's name there, if it has several.
        server_kind: `vllm`, `sglang` or `tgi`; None recognises it.
        server_logprobs: most likely tokens to ask for at each position.
        server_concurrency: requests sent at once.
        server_timeout: the longest wait for one sequence, in seconds.
        sampled: let the unquantized model continue the beginning of every sequence, and score that.
        reference_server: URL of a server of the unquantized model.
        reference_server_model: the model's name there, if it has several.
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
        ServerError: a server fails.
    """
    of_server = {
        "--server-model": server_model,
        "--server-kind": server_kind,
        "--sampled": sampled,
        "--reference-server": reference_server,
    }
    require_server(server, of_server)
    require_server(
        reference_server, {"--reference-server-model": reference_server_model}, "--reference-server"
    )
    options = resolve_options(
        _list_scales(scales),
        engine=engine,
        scheme=scheme,
        rules=rules,
        sensitivity=sensitivity,
        fp8_dtype=fp8_dtype,
        batch_size=batch_size,
        gate=gate,
        tasks=tasks,
        limit=limit,
        with_faults=server is not None,
        writes_text=sampled and reference_server is None,
    )
    specs, rows = split_data(data, text_column=text_column)
    text = VerificationText(
        specs=specs,
        rows=rows,
        samples=samples,
        seq_len=seq_len,
        pack=pack,
        text_column=text_column,
        tokenizer=tokenizer,
    )
    placement = Placement(device=device, dtype=dtype, device_map=device_map, memory=memory)
    request = (
        None
        if server is None
        else ServerRequest(
            url=server,
            model=server_model,
            kind=server_kind,
            num_top=server_logprobs,
            concurrency=server_concurrency,
            timeout_s=server_timeout,
            is_sampled=sampled,
            reference=reference_server,
            reference_model=reference_server_model,
            tokenizer=tokenizer,
            say=lambda text: warn_each([text]),
        )
    )
    reports = CallbackProgress(progress)
    with open_run_model(
        model,
        placement,
        revision=revision,
        trust_remote_code=trust_remote_code,
        if_quantized=if_quantized(str(model)),
    ) as found:
        job = open_verify_job(found, options, text, server=request)
        mode = choose_mode_beside(
            job, reference=reference_server, warn=lambda text: warn_each([text])
        )
        if mode is None:
            report = run_alone(job, gather_alone(job.plan, None), reports).report
        else:
            report = run_verify_job(job, mode, reports).report
    warn_each(report.warnings)
    return report


def _list_scales(scales: object) -> tuple[str | Path | CalibrationStats, ...]:
    """List the candidates, of which one needs no list.

    Raises:
        UsageError: one is neither statistics nor a path.
    """
    listed = (
        tuple(scales)
        if isinstance(scales, Iterable) and not isinstance(scales, Scales)
        else (scales,)
    )
    for each in listed:
        if not isinstance(each, Scales):
            raise UsageError(
                f"scales: must be statistics or a path, or a list of them, found {each!r}",
                hint="leave scales out to compare scale 1.0 alone",
            )
    return tuple(each.stats if isinstance(each, CalibrateResult) else each for each in listed)


def resolve_options(
    scales: Sequence[str | Path | CalibrationStats],
    *,
    engine: str,
    batch_size: int,
    scheme: str | None = None,
    rules: Sequence[str] = (),
    sensitivity: bool = False,
    fp8_dtype: str = E4M3FN.name,
    gate: str | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
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


def require_server(
    server: str | None, named: Mapping[str, object], option: str = "--server"
) -> None:
    """Refuse options of a server without one (`option`); `named` are their values by name.

    Raises:
        UsageError: naming the first.
    """
    useless = [name for name, value in named.items() if value]
    if server is None and useless:
        raise UsageError(f"{useless[0]} has no effect without {option}", hint=f"add {option} URL")


def if_quantized(name: str) -> str:
    """Say what to do instead of verifying a quantized model that cannot be decoded."""
    return f"pass the model it was made from as MODEL, and this one as --scales {name}"


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
