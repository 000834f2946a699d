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
    from fp8calib.data.sequences import DataPlan
    from fp8calib.verification.report import CandidateResult

_CALIBRATED, _LEAST = 4 / 5, 5
_ALIKE = 1.05
"""Sizes within this factor are alike: then the KLD decides."""
_OVERLAY, _UNSCALED = "kv-overlay", "scale-1.0"


@request_class
class AutoRequest(shared.TextOptions):
    """Calibrate, write FP8 checkpoints, and keep the smallest one that passes the gate.

    Four fifths of the text calibrate. On the rest the model is compared with an FP8 KV cache,
    without scales and with calibrated ones, and with each FP8 scheme that the GPU multiplies.

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
    tokenizer: Any = option(shared.TOKENIZER, default=None)


class Choice(Record):
    """A candidate, as `verify` measured it."""

    name: str
    """A folder in `out`, or scale-1.0: the model itself, with an FP8 KV cache."""
    size_bytes: int
    """Of its tensors."""
    verdict: str
    kld_mean: float | None
    kld_se: float | None
    ppl_ratio: float

    @property
    def passes(self) -> bool:
        """Whether the gate lets it pass, with a warning too."""
        return self.verdict not in {"fail", "cannot-tell"}


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
    def passed(self) -> bool:
        """Whether a choice passes the gate."""
        return bool(self.chosen)

    @property
    def exit_code(self) -> int:
        """8 where no choice passes the gate, 9 where the text cannot tell of any."""
        if self.passed:
            return 0
        is_unknown = all(each.verdict == "cannot-tell" for each in self.choices)
        return CANNOT_TELL if is_unknown else VerificationError.exit_code

    @property
    def answer(self) -> str:
        """The choice in a sentence."""
        if not self.chosen:
            return f"No choice passes the gate. {self.why}"
        one = next(each for each in self.choices if each.name == self.chosen)
        place = "the model itself" if one.name == _UNSCALED else self.out / one.name
        return f"Serve {place}: KLD {format_mean_kld(one.kld_mean, one.kld_se)}."


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
    if out.exists():
        raise UsageError(f"--out {out}: exists", hint="name another folder")
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
    common |= {"data": first, "samples": len(first)}
    calibrate(CalibrateRequest(**common, out=out, check=False), reporter)
    written = {_OVERLAY: out / _OVERLAY}
    checks = {_OVERLAY: check_written(out, out, path=_OVERLAY)}
    for name in schemes:
        reporter.say(next(numbered))
        try:
            found = _quantize(request, name, reporter)
        except (ExportError, ModelError) as error:  # no engine can load it, for one
            reporter.warn(f"{name} is no choice: {error.message}")
            continue
        checks[name] = found
        written[name] = out / name
    reporter.say(next(numbered))
    common |= {"data": rest, "samples": len(rest), "report": out / "report.html"}
    scales = list(written.values())
    verified = verify(VerifyRequest(**common, scales=scales, gate=request.gate), reporter)
    assert not isinstance(verified, RunPlan)  # noqa: S101 -- it is no dry run
    choices = _list_choices(verified.candidates, written, size)
    left = {Path(name).name for name in verified.unusable}
    left |= {name for name, found in checks.items() if not any(each.command for each in found)}
    unscaled = next(each for each in choices if each.name == _UNSCALED)
    if verified.kv is not None and verified.kv.answer == "no" and unscaled.passes:
        left.add(_OVERLAY)  # another rounding alone
    chosen = choose([each for each in choices if each.name not in left])
    for name, path in written.items():
        if name != chosen:
            shutil.rmtree(path)
    checked = checks.get(chosen, ())
    open_verdicts = (
        f"{Path(each.name).name} cannot be judged: {each.verdict_why}."
        for each in verified.candidates
        if each.verdict == "cannot-tell"
    )
    own = verified.next if chosen == _UNSCALED else ""
    return AutoResult(
        out=out,
        chosen=chosen,
        why="" if chosen else next(open_verdicts, verified.kv.why if verified.kv else ""),
        choices=tuple(choices),
        serve=next((each.command for each in checked if each.command), own),
        checked=checked,
    )


def _quantize(request: AutoRequest, scheme: str, reporter: Reporter) -> tuple[WrittenCheck, ...]:
    """Write a checkpoint and ask the engines; without KV scales if none can serve it with them."""
    from fp8calib.commands.written import check_written

    out = Path(request.out)
    found: tuple[WrittenCheck, ...] = ()
    named: dict[str, Any] = {"revision": request.revision, "check": False, "force": True}
    for stats in (out, None):
        if stats is None and SCHEMES[scheme].has_static_inputs:
            break
        quantize(
            QuantizeRequest(request.model, scheme, out / scheme, stats=stats, **named), reporter
        )
        found = check_written(out, out, path=scheme)
        if any(each.command for each in found):
            break
    return found


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


def _list_choices(
    candidates: Sequence[CandidateResult], written: Mapping[str, Path], size: int
) -> list[Choice]:
    """Name candidates by their folders; `size` is that of the model in 16 bits, in bytes."""
    sizes = {
        name: sum(file.stat().st_size for file in path.glob("*.safetensors"))
        for name, path in written.items()
    }
    measured = ("verdict", "kld_mean", "kld_se", "ppl_ratio")
    return [
        Choice(
            name=Path(each.name).name,
            size_bytes=sizes.get(Path(each.name).name, size),
            **{key: getattr(each, key) for key in measured},
        )
        for each in candidates
    ]


def describe(result: AutoResult, request: AutoRequest) -> Iterator[Block]:  # noqa: ARG001
    """Give the choice, what else was measured, the smallest first, and how to serve it."""
    yield Answer(result.answer)
    yield Line()
    rows = [
        [
            each.name + " *" * (each.name == result.chosen),
            format_size(each.size_bytes),
            each.verdict,
            format_mean_kld(each.kld_mean, each.kld_se),
            f"{each.ppl_ratio:.4f}",
        ]
        for each in sorted(result.choices, key=lambda choice: choice.size_bytes)
    ]
    yield Table(columns=["choice", "size", "verdict", "KLD mean ± se", "ratio"], rows=rows)
    yield Line()
    yield Line(f"written to {result.out}; all figures: {result.out / 'report.html'}")
    for text in describe_checks(result.checked) if result.checked else [result.serve]:
        yield Line(text)


auto = as_function("auto", AutoRequest, run)
