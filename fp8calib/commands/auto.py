"""Calibrate, quantize, verify and check in one command: the smallest checkpoint that passes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.output import format_size
from fp8calib.commands import options as shared
from fp8calib.commands import quantize
from fp8calib.commands.calibrate import CalibrateRequest
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.quantize import QuantizeRequest, QuantizeResult
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import Result, RunPlan, WrittenCheck, describe_checks
from fp8calib.commands.verify import VerifyRequest
from fp8calib.engines.gpus import find_gpu, list_multiplied
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import CANNOT_TELL, ExportError, ModelError, UsageError, VerificationError
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.text import Answer, Block, Line, Table
from fp8calib.verification.tables import format_mean_kld, format_ratio

if TYPE_CHECKING:
    from fp8calib.commands.verify_run import VerifyResult
else:  # importing it takes seconds
    VerifyResult = Any

_CALIBRATED, _LEAST, _ENOUGH = 4 / 5, 5, 40
_OVERLAY, _SCALE_ONE, _PAGE = "kv-overlay", "scale-1.0", "report.html"
_OTHER = "name another folder"
_STOPPED = f"{_OTHER}, or add --resume if that run was stopped before its end"


@request_class
class AutoRequest(shared.TextOptions):
    """Calibrate, write FP8 checkpoints, and keep the smallest one that passes the gate.

    Four fifths of the text calibrate. On the rest the model is compared with an FP8 KV cache,
    without scales and with calibrated ones, and beside it each scheme that the GPU multiplies.
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


class AutoResult(Result):
    """What was chosen, and what was measured of all choices."""

    out: Path
    chosen: str
    """A folder in `out`, or scale-1.0: the model as it is; empty where none passes."""
    sizes: Mapping[str, int]
    """The bytes of the tensors of each choice."""
    verified: VerifyResult
    """What `verify` says of all choices, with this decision; the candidates' names are paths."""
    serve: str
    """The command that serves it in vLLM, or else in SGLang."""
    checked: tuple[WrittenCheck, ...]

    @property
    def answer(self) -> str:
        """What to serve, or why nothing."""
        return self.verified.decision.headline

    @property
    def exit_code(self) -> int:
        """8 where no choice passes the gate, 9 where the text cannot tell of any."""
        is_unknown = all(e.verdict == "cannot-tell" for e in self.verified.candidates)
        failed = CANNOT_TELL if is_unknown else VerificationError.exit_code
        return 0 if self.chosen else failed


def run(request: AutoRequest, reporter: Reporter) -> AutoResult | RunPlan:
    """Choose how to serve a model in FP8.

    Raises:
        UsageError: an option is invalid, the folder exists, or the text has media or is too short.
        ModelError: the model cannot be read, or is quantized.
        DataError: the text cannot be read.
        CalibrationError, VerificationError: a forward pass failed, or gives NaN or infinity.
        ExportError: a checkpoint cannot be written.
    """
    with slow_imports():
        from fp8calib.commands import calibrate_run, model, suggest, verify_run
        from fp8calib.data.sources import split_data
        from fp8calib.verification.judge.decide import choose_smallest
        from fp8calib.verification.page.page import write_page
    out = Path(request.out)
    if out.exists() and ((out / _PAGE).exists() or not request.resume):
        raise UsageError(f"--out {out}: exists", hint=_OTHER if request.resume else _STOPPED)
    specs, rows = split_data(request.data, text_column=request.text_column)
    with model.open_run_model(request) as opened:
        data = model.read_settings(request, specs)
        more: dict[str, Any] = {"rows": rows, "tokenizer": request.tokenizer}
        text = model.plan_text(opened.source, data, part="calibrate", **more)
        size = opened.checkpoint.total_size_bytes
    count = 0 if text.media else len(text.sequences)
    if count < _LEAST:
        hint = "use --samples 40 or more; calibrate and verify take images and sound too"
        raise UsageError(f"{count} sequences of text alone are too few", hint=hint)
    cut = round(count * _CALIBRATED)
    if count < _ENOUGH:
        reporter.warn(f"{count - cut} sequences to verify may not tell: use text for --samples 40")
    schemes = list_multiplied(find_emulated("vllm")[0], find_gpu(request.gpu)) or ["w8a16"]
    steps = [
        f"calibrate on {cut} of {count} sequences",
        *(f"write {name}" for name in schemes),
        f"verify on the other {count - cut} sequences, keep the smallest that passes, and check it",
    ]
    if request.dry_run:
        return RunPlan(
            plan={"model": str(request.model), "weights_size_bytes": size, "steps": steps}
        )
    numbered = iter([f"step {i} of {len(steps)}: {each}" for i, each in enumerate(steps, 1)])
    common: dict[str, Any] = {e.name: getattr(request, e.name) for e in fields(shared.TextOptions)}
    common |= {"seq_len": text.seq_len, "text_column": None, "pack": False}
    reporter.say("\n".join([*(text.rows.describe() if text.rows else ()), next(numbered)]))
    common |= {"data": text.sequences[:cut], "samples": cut}
    asked = CalibrateRequest(**common, out=out, resume=request.resume, force=request.resume)
    made: Any = calibrate_run.run(asked, reporter)
    checks = {_OVERLAY: made.checked}
    sizes = {_SCALE_ONE: size, _OVERLAY: size}
    for name in schemes:
        reporter.say(next(numbered))
        if made := _quantize(request, name, reporter):
            checks[name] = tuple(e.model_copy(update={"path": name}) for e in made.checked)
            sizes[name] = made.bytes.after
    reporter.say(next(numbered))
    common |= {"data": text.sequences[cut:], "samples": count - cut, "gate": request.gate}
    judged = VerifyRequest(
        **common, strict=bool(request.gate), scales=[out / e for e in checks], report=out / _PAGE
    )
    report: Any = verify_run.run(judged, reporter)

    served = {name: e.command for name in checks for e in reversed(checks[name]) if e.command}
    served[_SCALE_ONE] = suggest.spell_server(str(request.model), judged, revision=request.revision)
    decision = choose_smallest(report, {name: sizes[name] for name in served})
    chosen = Path(decision.candidate).name
    report = report.model_copy(update={"decision": decision, "next": served.get(chosen, "")})
    write_page(report, out / _PAGE, command=report.next)
    for name in checks.keys() - {chosen}:
        shutil.rmtree(out / name)
    more = {"sizes": sizes, "serve": report.next, "checked": checks.get(chosen, ())}
    return AutoResult(out=out, chosen=chosen, verified=report, **more)


def _quantize(request: AutoRequest, scheme: str, reporter: Reporter) -> QuantizeResult | None:
    """Write a scheme, without KV scales if no engine serves it with them; None if it cannot be."""
    out, written = Path(request.out), None
    for stats in [out] if SCHEMES[scheme].has_static_inputs else [out, None]:
        common: dict[str, Any] = {"stats": stats, "revision": request.revision, "force": True}
        try:
            asked = QuantizeRequest(request.model, scheme, out / scheme, **common)
            written = quantize.run(asked, reporter)
        except (ExportError, ModelError) as error:  # no engine can load it, for one
            reporter.warn(f"{scheme} is no choice: {error.message}")
            break
        if any(each.command for each in written.checked):
            break
    return written


def describe(result: AutoResult, request: AutoRequest) -> Iterator[Block]:  # noqa: ARG001
    """Give the choice, what else was measured, the smallest first, and how to serve it."""
    rows = []
    for each in sorted(result.verified.candidates, key=lambda e: result.sizes[Path(e.name).name]):
        name, kld = Path(each.name).name, format_mean_kld(each.kld_mean, each.kld_se)
        ratio = format_ratio(each.ppl_ratio, each.ppl_ratio_se)
        size = format_size(result.sizes[name])
        rows.append([name + " *" * (name == result.chosen), size, each.verdict, kld, ratio])
    yield Answer(result.answer)
    yield Line()
    yield Table(columns=["choice", "size", "verdict", "KLD mean ± se", "ratio ± se"], rows=rows)
    yield Line(f"all figures: {result.out / _PAGE}")
    served = describe_checks(result.checked) if result.checked else [result.serve]
    yield from map(Line, filter(None, served))


auto = as_function("auto", AutoRequest, run)
