"""Compare what `check` says of a checkpoint with what an engine did."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.real_engines.fuzz.observation import HeldPair, Observation, is_scale

_USED, _REFUSED = "used", "refused"
_EITHER = "the engine stops, or"
"""What `check` says of weights that an engine either refuses or misreads."""
_CLOSE = 0.01
"""A scale that is rounded to the model's dtype is still the one in the file."""


class Kind(StrEnum):
    """How `check` and an engine disagree, the worst first."""

    CRASH = "check ends in an error of its own"
    FALSE_OK = "check says fine, the engine does something else"
    FALSE_ALARM = "check refuses or warns, the engine does it right"
    OTHER_FAULT = "neither is fine, but check names something else than happens"


_ORDER = list(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A disagreement."""

    kind: Kind
    check: str
    engine: str


def compare(
    report: Mapping[str, Any],
    seen: Observation,
    stored: Mapping[int, Collection[float]],
    *,
    has_kv: bool,
) -> Finding | None:
    """Find the worst disagreement about one engine; None where there is none.

    Args:
        report: what `check --json` says of the engine.
        seen: what the engine did.
        stored: the small scales that the files hold, by layer.
        has_kv: whether the checkpoint is meant to have KV scales.
    """
    refused = find_refusal(report)
    if seen.error:
        if refused or _EITHER in str(report["weights"]):
            return None
        kind = Kind.FALSE_OK if _is_fine(report, has_kv=has_kv) else Kind.OTHER_FAULT
        return Finding(kind=kind, check=_describe(report), engine=seen.error)
    if refused:
        held = _find_fault(report, seen, stored)
        kind = Kind.OTHER_FAULT if held else Kind.FALSE_ALARM
        return Finding(
            kind=kind, check=refused, engine=held or "it loads, and holds the file's numbers"
        )
    findings = [*_compare_layers(report, seen, stored), *_compare_weights(report, seen)]
    return min(findings, key=lambda finding: _ORDER.index(finding.kind), default=None)


def find_refusal(report: Mapping[str, Any]) -> str:
    """Give why `check` says that the engine does not start; empty where it starts."""
    verdicts = [layer[role] for layer in report["layers"] for role in "kv"]
    verdicts += [report["weights"]] if report["weights"] else []
    return next((f"refused: {each['why']}" for each in verdicts if each["status"] == _REFUSED), "")


def _is_fine(report: Mapping[str, Any], *, has_kv: bool) -> bool:
    fine = {_USED} if has_kv else {_USED, "defaulted"}
    statuses = {layer[role]["status"] for layer in report["layers"] for role in "kv"}
    return report["weights"] is None and statuses <= fine


def _describe(report: Mapping[str, Any]) -> str:
    """Say in short what `check` says of an engine that it does not call refused."""
    if report["ok"]:
        notes = [text for text in report["problems"] if text.startswith("weights:")]
        return "; ".join(("ok", *notes[:1]))
    if weights := report["weights"]:
        return f"weights {weights['status']}: {weights['why']}"
    faults = [
        f"layer {layer['layer']} {role} {layer[role]['status']}: {layer[role]['why']}"
        for layer in report["layers"]
        for role in "kv"
        if layer[role]["status"] != _USED
    ]
    return next(iter(faults), "no layer has a cache")


def _find_fault(
    report: Mapping[str, Any], seen: Observation, stored: Mapping[int, Collection[float]]
) -> str:
    """Say why what the engine holds is not what the file means; empty where it is."""
    if seen.weights_fault:
        return f"it loads: {seen.weights_fault}"
    for layer in report["layers"]:
        index = layer["layer"]
        pair = seen.layers.get(index)
        if pair is None:
            return f"it loads: layer {index} has no scales"
        for role, values in (("k", pair.k), ("v", pair.v)):
            if not _is_meant(pair, values, stored.get(index, ())):
                return f"it loads: layer {index} {_show(role, pair, values)}"
    return ""


def _is_meant(pair: HeldPair, values: tuple[float, ...], stored: Collection[float]) -> bool:
    return pair.is_fp8 and all(
        is_scale(value) and any(math.isclose(value, one, rel_tol=_CLOSE) for one in stored)
        for value in values
    )


def _show(role: str, pair: HeldPair, values: tuple[float, ...]) -> str:
    shown = ", ".join(f"{value:.7g}" for value in values[:4]) or "no scale"
    return f"{role} {shown}{'' if pair.is_fp8 else ', in a cache of 16 bits'}"


def _compare_layers(
    report: Mapping[str, Any], seen: Observation, stored: Mapping[int, Collection[float]]
) -> list[Finding]:
    findings = []
    for layer in report["layers"]:
        index = layer["layer"]
        pair = seen.layers.get(index, HeldPair(k=(), v=(), is_fp8=False))
        for role, values in (("k", pair.k), ("v", pair.v)):
            verdict = layer[role]
            is_used = verdict["status"] == _USED
            is_meant = bool(values) and _is_meant(pair, values, stored.get(index, ()))
            if _is_foreseen(verdict["value"], values, is_meant=is_meant) and (
                pair.is_fp8 or not is_used
            ):
                continue
            other = Kind.FALSE_ALARM if is_meant else Kind.OTHER_FAULT
            said = f"layer {index} {role} {verdict['status']} {verdict['value']}: {verdict['why']}"
            findings.append(
                Finding(
                    kind=Kind.FALSE_OK if is_used else other,
                    check=said,
                    engine=_show(role, pair, values),
                )
            )
    return findings


def _is_foreseen(value: float | None, held: tuple[float, ...], *, is_meant: bool) -> bool:
    """Whether a layer holds the number that `check` gives, which is the largest of its heads.

    Without a number, it says that there is none, or that it is uninitialised memory.
    """
    if value is None:
        return not is_meant
    return bool(held) and (max(held) == value or (value <= 0 and value in held))


def _compare_weights(report: Mapping[str, Any], seen: Observation) -> list[Finding]:
    if bool(report["weights"]) == bool(seen.weights_fault):
        return []
    if report["weights"]:
        said = f"weights {report['weights']['status']}: {report['weights']['why']}"
        held = "it computes with the model's weights"
        return [Finding(kind=Kind.FALSE_ALARM, check=said, engine=held)]
    notes = [text for text in report["problems"] if text.startswith("weights:")]
    said = notes[0] if notes else "nothing of the weights"
    return [Finding(kind=Kind.FALSE_OK, check=said, engine=seen.weights_fault)]
