"""The decisions of `auto`, and what it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8calib.blocks import Block, Line
from fp8calib.engines.registry import find_replayed
from fp8calib.requests.auto import AutoRequest
from fp8calib.results.auto import AutoResult
from fp8calib.verification.figures import format_mean_kld


def describe(result: AutoResult, request: AutoRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe each decision, and what was written or came closest."""
    yield from map(Line, _describe(result))


def _describe(report: AutoResult) -> Iterator[str]:
    yield from (f"{each.question} {each.answer}: {each.why}" for each in report.decisions)
    if report.written is None or report.verified is None:
        if report.broken:
            yield report.broken
        unknown = "too little text to tell what passes" if report.is_unknown else "nothing passes"
        what = "it cannot be told what passes" if report.broken else unknown
        yield f"{what} the {report.gate} gate for {report.engine}, and no checkpoint is written"
        if report.tried:
            yield "tried: " + "; ".join(f"{a.name}: {a.verdict}" for a in report.tried)
        yield f"closest: {report.closest}"
        if report.is_unknown and not report.broken:
            yield "next: the same command with more --data, or with a larger --samples"
        return
    found, place = report.verified, Path(report.out) / report.written.name
    yield (
        f"{place}, read back: {found.verdict}, {found.verdict_why}, "
        f"KLD {format_mean_kld(found.kld_mean, found.kld_se)}, "
        f"top-1 agreement {found.top1_agreement:.2%}"
    )
    for engine, checked in report.checked.items():
        because = f": {checked.why}" if checked.why else ""
        what = "uses it" if checked.ok else f"does not use all of it{because}"
        yield f"{engine} {checked.version}: {what}"
    if report.serve:
        title = find_replayed(report.engine).title
        yield f"serve with {title}:\n    {report.serve}"
