"""The verdicts of `check`, layers with the same verdict on one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8calib.blocks import Block, Line, Table, Warn
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.errors import format_ranges
from fp8calib.requests.check import CheckRequest
from fp8calib.results.check import CheckResult

_NUMBER_IN_NAME = re.compile(r"(?<=[._-])\d+(?=[._-])")
"""The number of a layer in the name of its tensor, or of a file."""
_UNREAD = "values of weights are not read, except scales, norms and biases"


def describe(result: CheckResult, request: CheckRequest) -> Iterator[Block]:
    """Give the verdict first and last, and a table for each engine."""
    verdict = f"{request.path}: {result.verdict}"
    yield Line(verdict)
    for name, engine in result.engines.items():
        title = f"{engine.engine} {engine.version}: {engine.summary}"
        if engine.loads_without_kv:
            yield Line(title)
        else:
            columns = ["layers", "", "what", "value", "why"]
            yield Table(title=title, columns=columns, rows=_rows(engine))
        if engine.fingerprint and not engine.loads_without_kv:
            yield Line(f"  KV scales as loaded: fingerprint {engine.fingerprint}")
        if engine.weights is not None:
            yield Line(f"  weights {engine.weights.status}: {engine.weights.why}")
        for fix in _list_fixes(engine):
            yield Line(f"  fix: {fix}")
        for reason in engine.unknown:
            yield Warn(f"{name}: unknown: {reason}")
        for suspicion in engine.suspicious:
            yield Warn(f"{name}: suspicious: {suspicion}")
        for problem in engine.problems:
            yield Warn(f"{name}: {problem}")
    if not Path(request.path).is_file():
        yield Line(_UNREAD)
    yield Line(verdict)


def _rows(engine: EngineReport) -> list[list[str]]:
    rows = []
    for role in ("k", "v"):
        for layers in _group(engine, role).values():
            first: LoadVerdict = getattr(layers[0], role)
            values = [getattr(layer, role).value for layer in layers]
            indices = [layer.layer for layer in layers]
            rows.append(
                [format_ranges(indices), role, first.status, _format_values(values), first.why]
            )
    return rows


def _group(engine: EngineReport, role: str) -> Mapping[tuple[str, str], list[LayerVerdict]]:
    """Group layers by what happens to their scale; reasons that differ stay apart."""
    groups: dict[tuple[str, str], list[LayerVerdict]] = {}
    for layer in engine.layers:
        verdict: LoadVerdict = getattr(layer, role)
        why = "" if verdict.status is Status.USED else _NUMBER_IN_NAME.sub("#", verdict.why)
        groups.setdefault((verdict.status, why), []).append(layer)
    return groups


def _format_values(values: list[float | None]) -> str:
    numbers = sorted({value for value in values if value is not None})
    if not numbers:
        return "-"
    low, high = f"{numbers[0]:.6g}", f"{numbers[-1]:.6g}"
    return low if low == high else f"{low} to {high}"


def _list_fixes(engine: EngineReport) -> list[str]:
    if engine.loads_without_kv:
        return [engine.weights.fix] if engine.weights is not None and engine.weights.fix else []
    verdicts = [*engine.verdicts, *([engine.weights] if engine.weights is not None else [])]
    return list(dict.fromkeys(verdict.fix for verdict in verdicts if verdict.fix))
