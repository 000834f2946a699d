"""The smallest candidate that passes its gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.judge.decide import has_kv_only
from fp8calib.verification.report import SCALE_ONE, Decision, Remedy, Verdict, VerifyReport

_ALIKE = 1.05
"""Sizes within this factor are alike: then the KLD decides."""


def choose_smallest(report: VerifyReport, sizes: Mapping[str, int]) -> Decision:
    """Decide on the smallest candidate that passes without a warning.

    Scales of a KV cache that does not need them are no choice: they are another rounding alone.

    Args:
        report: all candidates.
        sizes: those that can be chosen, by the last part of their path, and their bytes.
    """
    found = {Path(each.name).name: each for each in report.candidates}
    passing = {
        name: each
        for name, each in found.items()
        if name in sizes and each.verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}
        if each.name not in report.unusable
    }
    if report.kv is not None and report.kv.answer == "no" and SCALE_ONE in passing:
        passing = {
            name: each
            for name, each in passing.items()
            if name == SCALE_ONE or not has_kv_only(each.name, report.layers)
        }
    if not passing:
        nearest = min(found, key=lambda name: found[name].kld_mean or 0.0)
        verdict = f"{found[nearest].verdict}: {found[nearest].verdict_why}"
        headline = (
            f"No choice passes the gate; the nearest, {nearest}, gets {verdict}. "
            "`quantize --scheme w8a16` or `gptq` may lose less."
        )
        return Decision(headline=headline, details=report.decision.details)
    least = min(sizes[name] for name in passing)
    small = [name for name in passing if sizes[name] <= least * _ALIKE]
    best = min((passing[name] for name in small), key=lambda each: each.kld_mean or 0.0)
    is_model = best.name == SCALE_ONE
    cost = f"KLD {format_mean_kld(best.kld_mean, best.kld_se)}"
    return Decision(
        headline=f"Serve {'the model itself' if is_model else best.name}: {cost}.",
        details=report.decision.details,
        remedy=Remedy.SERVE if is_model else Remedy.USE,
        candidate=best.name,
    )
