"""Run `fp8calib auto`: measure, decide, write, verify, check, print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8calib.api.auto.measure import AutoTask
from fp8calib.api.auto.report import AutoReport
from fp8calib.api.auto.run import plan_auto
from fp8calib.api.auto.run import run_auto as measure_and_write
from fp8calib.cli.command_line import spell_command
from fp8calib.cli.console import Bar, print_json, print_text, prints_json, say, warn
from fp8calib.cli.plan_table import show_plan
from fp8calib.cli.setup import make_placement, quiet_libraries
from fp8calib.engines.registry import find_replayed
from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.requests.auto import AutoRequest
from fp8calib.verification.report import format_kld


def run_auto(settings: AutoRequest) -> int:
    """Choose and write the FP8 form of a model, print why, and return the exit code."""
    quiet_libraries()
    out = settings.out or Path(f"{Path(settings.model).resolve().name}-fp8")
    task = AutoTask(
        model=settings.model,
        out=out,
        gate=settings.gate,
        engine=settings.engine,
        data=tuple(settings.data or ()),
        text_column=settings.text_column,
        samples=settings.samples,
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        pack=not settings.no_pack,
        placement=make_placement(settings),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        resume=settings.resume,
        force=settings.force,
    )
    if settings.dry_run:
        show_plan(plan_auto(task), "plan (nothing was run or written)", as_json=prints_json())
        return 0
    with Bar() as bar:
        report = measure_and_write(task, bar, say, command=spell_command())
    for text in report.warnings:
        warn(text)
    if prints_json():
        print_json(report.to_json())
    else:
        for text in _describe(report):
            print_text(text)
    if report.passed:
        return 0
    return CANNOT_TELL if report.is_unknown else VerificationError.exit_code


def _describe(report: AutoReport) -> Iterator[str]:
    yield from (f"{each.question} {each.answer}: {each.why}" for each in report.decisions)
    if report.written is None or report.verified is None:
        unknown = "too little text to tell what passes" if report.is_unknown else "nothing passes"
        yield f"{unknown} the {report.gate} gate for {report.engine}, and no checkpoint is written"
        if report.tried:
            yield "tried: " + "; ".join(f"{a.name}: {a.verdict}" for a in report.tried)
        yield f"closest: {report.closest}"
        if report.is_unknown:
            yield "next: the same command with more --data, or with a larger --samples"
        return
    found, place = report.verified, Path(report.out) / report.written.name
    yield (
        f"{place}, read back: {found.verdict}, {found.verdict_why}, "
        f"KLD {format_kld(found.kld_mean, found.kld_se)}, "
        f"top-1 agreement {found.top1_agreement:.2%}"
    )
    for engine, checked in report.checked.items():
        what = "uses it" if checked.ok else f"does not use all of it{_because(checked.why)}"
        yield f"{engine} {checked.version}: {what}"
    if report.serve:
        title = find_replayed(report.engine).title
        yield f"serve with {title}:\n    {report.serve}"


def _because(why: str) -> str:
    return f": {why}" if why else ""
