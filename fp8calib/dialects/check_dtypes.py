"""What it means for an engine that a folder records another FP8 format than e4m3fn."""

from __future__ import annotations

from fp8calib.dialects.check_files import ScaleFolder
from fp8calib.dialects.check_report import EngineReport, LayerVerdict, Status, Verdict

_KEYS = ("kv_cache_torch_dtype", "kv_cache_dtype")


def find_recorded_dtype(folder: ScaleFolder) -> str:
    """Give what the folder says its scales are for, in config.json or a header; else nothing."""
    named = [folder.config.get(key) for key in _KEYS]
    found = [value for value in (*named, *folder.recorded.values()) if isinstance(value, str)]
    return next((value for value in found if "fnuz" in value or "e5m2" in value), "")


def amend_for_dtype(report: EngineReport, dtype: str, fnuz: str, e5m2: str) -> EngineReport:
    """Turn scales that are used into misread ones where they were made for another format.

    Args:
        report: what the engine does with scales for e4m3fn.
        dtype: what the folder records, for example `float8_e4m3fnuz`.
        fnuz: what the engine does with a scale for e4m3fnuz.
        e5m2: what it does with one for e5m2.
    """
    if "fnuz" in dtype:
        why, mend = fnuz, "convert the scales to e4m3fn: half of each, and record that dtype"
    elif "e5m2" in dtype:
        why, mend = e5m2, "calibrate for e4m3fn; engines use no scales with e5m2"
    else:
        return report
    text = f"recorded for {dtype[:40]!a}: {why}"
    layers = tuple(
        LayerVerdict(
            layer=layer.layer, k=_amend(layer.k, text, mend), v=_amend(layer.v, text, mend)
        )
        for layer in report.layers
    )
    return report.model_copy(update={"layers": layers})


def _amend(verdict: Verdict, why: str, mend: str) -> Verdict:
    if verdict.status is not Status.USED:
        return verdict
    return verdict.model_copy(update={"status": Status.MISREAD, "why": why, "mend": mend})
