"""Verdicts for model types that this tool does not know: what would be a guess is none."""

from __future__ import annotations

from fp8calib.dialects.check_report import CheckReport, EngineReport, LayerVerdict, Status, Verdict

_MEND = "load it in the engine and read the scales in its log, or serve a known architecture"


def amend_for_unknown(report: CheckReport, model_type: str) -> CheckReport:
    """Take back every `used`: whether an engine's own model has the place cannot be told.

    What stops any model (no quantization_config, a missing shard, a number that is no scale) stays.
    """
    engines = {name: _amend(name, engine, model_type) for name, engine in report.engines.items()}
    return CheckReport(engines=engines)


def _amend(name: str, report: EngineReport, model_type: str) -> EngineReport:
    why = (
        f"model_type {model_type} is unknown to this tool: whether {name} has a place for the "
        "scale cannot be told"
    )
    layers = tuple(
        LayerVerdict(layer=layer.layer, k=_take_back(layer.k, why), v=_take_back(layer.v, why))
        for layer in report.layers
    )
    problem = f"model_type {model_type} is unknown to this tool: its layers are taken from names"
    return report.model_copy(update={"layers": layers, "problems": (*report.problems, problem)})


def _take_back(verdict: Verdict, why: str) -> Verdict:
    if verdict.status is not Status.USED:
        return verdict
    text = f"{why} ({verdict.why})"
    return Verdict(status=Status.DROPPED, value=None, why=text, mend=_MEND)
