"""Print the verdicts of `fp8calib check`, layers with the same verdict on one line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8calib.cli.console import print_json, print_table, print_text, warn
from fp8calib.engines.replay.verdicts import CheckReport, EngineReport, LayerVerdict, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.errors import format_ranges

_NUMBER_IN_NAME = re.compile(r"(?<=[._-])\d+(?=[._-])")
"""The number of a layer in the name of its tensor, or of a file."""


def show_check_report(report: CheckReport, path: str, *, as_json: bool) -> None:
    """Print every engine's verdicts, as tables or as one JSON object."""
    if as_json:
        print_json(report.to_json())
        return
    verdict = f"{path}: {'ok' if report.ok else 'not ok'}"
    print_text(verdict)
    for name, engine in report.engines.items():
        title = f"{name.partition('==')[0]} {report.versions[name]}: {_summarize(engine)}"
        if engine.loads_without_kv:
            print_text(title)
        else:
            print_table(title, ["layers", "", "what", "value", "why"], _rows(engine))
        if engine.weights is not None:
            print_text(f"  weights {engine.weights.status}: {engine.weights.why}")
        for fix in _list_fixes(engine):
            print_text(f"  fix: {fix}")
        for reason in engine.unknown:
            warn(f"{name}: unknown: {reason}")
        for suspicion in engine.suspicious:
            warn(f"{name}: suspicious: {suspicion}")
        for problem in engine.problems:
            warn(f"{name}: {problem}")
    print_text(verdict)


def _summarize(engine: EngineReport) -> str:
    if engine.loads_without_kv:
        loads = "not ok" if engine.weights is not None else "ok, loads"
        return f"{loads}; the KV cache is not quantized (an FP8 cache would use scale 1.0)"
    used = sum(layer.ok for layer in engine.layers)
    return f"{'ok' if engine.ok else 'not ok'}, {used} of {len(engine.layers)} layers served"


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
    verdicts = [verdict for layer in engine.layers for verdict in (layer.k, layer.v)]
    verdicts += [engine.weights] if engine.weights is not None else []
    return list(dict.fromkeys(verdict.fix for verdict in verdicts if verdict.fix))
