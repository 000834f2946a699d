"""The smallest candidate that passes its gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.judge.decide import has_kv_only
from fp8calib.verification.report import SCALE_ONE, Verdict, VerifyReport

_ALIKE = 1.05
"""Sizes within this factor are alike: then the KLD decides."""


def choose_smallest(report: VerifyReport, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Choose the smallest candidate that passes without a warning, and say why.

    Scales of a KV cache that does not need them are no choice: they are another rounding alone.

    Args:
        report: all candidates.
        sizes: those that can be chosen, by the last part of their path, and their bytes.

    Returns:
        The last part of the path of the chosen one, empty where none passes; and a sentence.
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
        return "", f"No choice passes the gate; the nearest, {nearest}, gets {verdict}."
    least = min(sizes[name] for name in passing)
    small = [name for name in passing if sizes[name] <= least * _ALIKE]
    chosen = min(small, key=lambda name: passing[name].kld_mean or 0.0)
    best = passing[chosen]
    place = "the model itself" if chosen == SCALE_ONE else best.name
    return chosen, f"Serve {place}: KLD {format_mean_kld(best.kld_mean, best.kld_se)}."
