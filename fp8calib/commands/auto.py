"""Calibrate, quantize, verify and check in one command: the smallest checkpoint that passes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.disk import format_size
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.quantize import QuantizeRequest
from fp8calib.commands.quantize import run as quantize
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import Record, Result, RunPlan, WrittenCheck, describe_checks
from fp8calib.engines.facts.gpus import find_gpu
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import CANNOT_TELL, ExportError, ModelError, UsageError, VerificationError
from fp8calib.numerics.schemes import SCHEMES, InputScaling
from fp8calib.text import Answer, Block, Line, Table
from fp8calib.verification.figures import format_mean_kld

if TYPE_CHECKING:
    from fp8calib.commands._verify import VerifyResult
    from fp8calib.data.sequences import DataPlan

_CALIBRATED, _LEAST = 4 / 5, 5
_ALIKE = 1.05
"""Sizes within this factor are alike: then the KLD decides."""
_OVERLAY, _SCALE_ONE, _PAGE = "kv-overlay", "scale-1.0", "report.html"


@request_class
class AutoRequest(shared.TextOptions):
    """Calibrate, write FP8 checkpoints, and keep the smallest one that passes the gate.

    Four fifths of the text calibrate. On the rest the model is compared with an FP8 KV cache,
    without scales and with calibrated ones, and with each FP8 scheme that the GPU multiplies.
    Exit code 8 if none passes (a warning is no pass), 9 if the text cannot tell.

    Example: fp8calib auto meta-llama/Llama-3.1-8B-Instruct --data chats.jsonl --out llama-fp8
    """

    out: str | Path = option("--out DIR", "Output folder; must not exist.", reads=Path)
    data: shared.TextData | None = option(shared.DATA, default=None)
    _: KW_ONLY
    gpu: str = option(
        "--gpu NAME", "The GPU that serves, such as L40S.", check=find_gpu, default="H100"
    )
    gate: str | None = option(
        "--gate kv|w8a8|FILE",
        "Thresholds; default: w8a8 for FP8 weights, kv for an FP8 KV cache alone.",
        check=shared.check_gate,
        default=None,
    )
    resume: bool = option("--resume", "Continue an interrupted or killed run.", default=False)
    tokenizer: Any = option(shared.TOKENIZER, default=None)


class Choice(Record):
    """A candidate, as `verify` measured it; `name` is a folder in `out`, or scale-1.0.

    `size_bytes` is that of its tensors.
    """

    name: str
    size_bytes: int
    verdict: str
    kld_mean: float | None
    kld_se: float | None
    ppl_ratio: float

    @property
    def passes(self) -> bool:
        """Whether the gate lets it pass without a warning."""
        return self.verdict in {"pass", "no-difference"}


class AutoResult(Result):
    """What was chosen, and what else was measured."""

    out: Path
    chosen: str
    """The name of the choice; empty where none passes."""
    choices: tuple[Choice, ...]
    why: str = ""
    """What `verify` says where none passes."""
    serve: str
    """The command that serves it in vLLM, or else in SGLang."""
    checked: tuple[WrittenCheck, ...]

    @property
    def answer(self) -> str:
        """What to serve, or why nothing."""
        if not self.chosen:
            return f"No choice passes the gate. {self.why}"
        best = next(each for each in self.choices if each.name == self.chosen)
        place = "the model itself" if self.chosen == _SCALE_ONE else self.out / self.chosen
        return f"Serve {place}: KLD {format_mean_kld(best.kld_mean, best.kld_se)}."

    @property
    def passed(self) -> bool:
        """Whether a choice passes the gate."""
        return bool(self.chosen)

    @property
    def exit_code(self) -> int:
        """8 where no choice passes the gate, 9 where the text cannot tell of any."""
        is_unknown = all(each.verdict == "cannot-tell" for each in self.choices)
        failed = CANNOT_TELL if is_unknown else VerificationError.exit_code
        return 0 if self.chosen else failed


def run(request: AutoRequest, reporter: Reporter) -> AutoResult | RunPlan:
    """Choose how to serve a model in FP8.

    Raises:
        UsageError: an option is invalid, the folder exists, or the text has media or is too short.
        ModelError: the model cannot be read, or is quantized.
        DataError: the text cannot be read.
        CalibrationError: a forward pass failed.
        ExportError: a checkpoint cannot be written.
        VerificationError: a model gives NaN or infinity.
    """
    with slow_imports():
        from fp8calib.commands._verify import run as verify
        from fp8calib.commands.calibrate import CalibrateRequest
        from fp8calib.commands.calibrate import run as calibrate
        from fp8calib.commands.verify import VerifyRequest
        from fp8calib.commands.written import check_written
    out, schemes = Path(request.out), list(list_schemes(request.gpu))
    if out.exists() and not request.resume:
        raise UsageError(f"--out {out}: exists", hint="name another folder, or pass --resume")
    if (out / _PAGE).exists():
        raise UsageError(f"--out {out}: auto has finished there", hint="name another folder")
    text, size = _read_text(request)
    cut = round(len(text.sequences) * _CALIBRATED)
    first, rest = text.sequences[:cut], text.sequences[cut:]
    steps = [
        f"calibrate on {len(first)} of {len(text.sequences)} sequences",
        *(f"write {name}" for name in schemes),
        f"verify on the other {len(rest)} sequences, keep the smallest that passes, and check it",
    ]
    if request.dry_run:
        return RunPlan(
            plan={"model": str(request.model), "weights_size_bytes": size, "steps": steps}
        )
    numbered = iter([f"step {i} of {len(steps)}: {each}" for i, each in enumerate(steps, 1)])
    places = ("model", "device", "dtype", "memory", "revision", "trust_remote_code", "progress")
    common: dict[str, Any] = {name: getattr(request, name) for name in places}
    common |= {"seq_len": text.seq_len, "pack": False}

    reporter.say(next(numbered))
    measured: dict[str, Any] = {
        "data": first,
        "samples": len(first),
        "resume": request.resume,
        "check": False,
    }
    calibrate(CalibrateRequest(**common, **measured, out=out), reporter)
    checks = {_OVERLAY: check_written(out, out, path=_OVERLAY)}
    for name in schemes:
        reporter.say(next(numbered))
        for stats in (out, None):  # without KV scales if no engine serves it with them
            if stats is None and SCHEMES[name].has_static_inputs:
                continue
            options: dict[str, Any] = {"stats": stats, "revision": request.revision}
            options |= {"check": False, "force": True}
            try:
                quantize(QuantizeRequest(request.model, name, out / name, **options), reporter)
            except (ExportError, ModelError) as error:  # no engine can load it, for one
                reporter.warn(f"{name} is no choice: {error.message}")
                break
            checks[name] = check_written(out, out, path=name)
            if any(each.command for each in checks[name]):
                break
    reporter.say(next(numbered))
    compared: dict[str, Any] = {
        "data": rest,
        "samples": len(rest),
        "strict": request.gate is not None,
    }
    compared |= {"gate": request.gate, "report": out / _PAGE, "force": True}
    scales = [out / name for name in checks]
    report = verify(VerifyRequest(**common, **compared, scales=scales), reporter)
    assert not isinstance(report, RunPlan)  # noqa: S101 -- it is no dry run
    launch = find_emulated("vllm")[0].launch
    own = "" if launch is None else launch.spell(str(request.model))
    own += " --trust-remote-code" * request.trust_remote_code
    return _conclude(out, report, checks, size, own)


def _conclude(
    out: Path,
    report: VerifyResult,
    checks: Mapping[str, Sequence[WrittenCheck]],
    size: int,
    own: str,
) -> AutoResult:
    """Choose, and delete the other checkpoints.

    `size` is that of the model in 16 bits, in bytes, and `own` the command that serves it.
    """
    keys = ("verdict", "kld_mean", "kld_se", "ppl_ratio")
    choices, reasons = {}, []
    for each in report.candidates:
        name, files = Path(each.name).name, (out / Path(each.name).name).glob("*.safetensors")
        held = sum(file.stat().st_size for file in files) if name in checks else size
        found = {key: getattr(each, key) for key in keys}
        choices[name] = Choice(name=name, size_bytes=held, **found)
        if each.verdict in {"warn", "cannot-tell"}:
            reasons.append(f"{name} gets {each.verdict}: {each.verdict_why}.")
    left = {Path(name).name for name in report.unusable}
    left |= {name for name, found in checks.items() if not any(each.command for each in found)}
    if report.kv is not None and report.kv.answer == "no" and choices[_SCALE_ONE].passes:
        left.add(_OVERLAY)  # another rounding alone
    chosen = choose([each for name, each in choices.items() if name not in left])
    for name in checks.keys() - {chosen}:
        shutil.rmtree(out / name)
    checked = tuple(checks.get(chosen, ()))
    reasons.append(report.kv.why if report.kv else "")
    return AutoResult(
        out=out,
        chosen=chosen,
        why="" if chosen else reasons[0],
        choices=tuple(choices.values()),
        serve=next((each.command for each in checked if each.command), own if chosen else ""),
        checked=checked,
    )


def _read_text(request: AutoRequest) -> tuple[DataPlan, int]:
    """Read the text, and the bytes of the model's weights."""
    from fp8calib.commands.model import open_run_model, plan_text, read_settings
    from fp8calib.data.sources import split_data

    specs, rows = split_data(request.data, text_column=request.text_column)
    with open_run_model(request) as model:
        data = read_settings(request, specs)
        text = plan_text(
            model.source, data, rows=rows, part="calibrate", tokenizer=request.tokenizer
        )
        size = model.checkpoint.total_size_bytes
    if text.media:
        raise UsageError("auto takes text alone", hint="run calibrate and verify")
    if len(text.sequences) < _LEAST:
        raise UsageError(f"{len(text.sequences)} sequences are too few", hint="use 40 or more")
    return text, size


def list_schemes(gpu: str) -> Iterator[str]:
    """List the schemes whose inputs a GPU multiplies as they are stored; without any, w8a16."""
    engine, serving = find_emulated("vllm")[0], find_gpu(gpu)
    multiplied = [
        name
        for name, scheme in SCHEMES.items()
        if scheme.inputs is not InputScaling.NONE
        and not engine.explain_unmultiplied(scheme, serving)
    ]
    yield from multiplied or ["w8a16"]


def choose(choices: Sequence[Choice]) -> str:
    """Name the smallest that passes, of sizes that are alike the one of the smallest KLD."""
    passing = [each for each in choices if each.passes]
    least = min((each.size_bytes for each in passing), default=0)
    small = [each for each in passing if each.size_bytes <= least * _ALIKE]
    best = min(small, key=lambda each: each.kld_mean or 0.0, default=None)
    return "" if best is None else best.name


def describe(result: AutoResult, request: AutoRequest) -> Iterator[Block]:  # noqa: ARG001
    """Give the choice, what else was measured, the smallest first, and how to serve it."""
    rows = []
    for each in sorted(result.choices, key=lambda choice: choice.size_bytes):
        kld, size = format_mean_kld(each.kld_mean, each.kld_se), format_size(each.size_bytes)
        name = each.name + " *" * (each.name == result.chosen)
        rows.append([name, size, each.verdict, kld, f"{each.ppl_ratio:.4f}"])
    yield Answer(result.answer)
    yield Line()
    yield Table(columns=["choice", "size", "verdict", "KLD mean ± se", "ratio"], rows=rows)
    yield Line()
    yield Line(f"written to {result.out}; all figures: {result.out / _PAGE}")
    for text in describe_checks(result.checked) if result.checked else [result.serve]:
        yield Line(text)


auto = as_function("auto", AutoRequest, run)
