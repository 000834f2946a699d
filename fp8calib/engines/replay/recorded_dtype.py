"""Scales that a config or a file's header declares to be for another format than e4m3fn."""

from __future__ import annotations

from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.quantization_config import find_modelopt_section
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.numerics.formats import NVFP4_CACHE

_OTHER_FORMAT = "the engine multiplies an FP8 cache by scales that were made for another format"
_KEYS = ("kv_cache_torch_dtype", "kv_cache_dtype")
_OTHER_CACHE = "this engine has no such KV cache"


def _find_recorded_dtype(folder: ScaleFolder) -> str:
    """Find the format that a config or a header names for the scales; empty for e4m3fn."""
    named = [folder.config.get(key) for key in _KEYS]
    algorithm = _find_algorithm(folder)
    if algorithm not in ("", "FP8"):
        return algorithm
    found = [value for value in (*named, *folder.recorded.values()) if isinstance(value, str)]
    return next((x for x in found if "fnuz" in x or "e5m2" in x or x == NVFP4_CACHE), "")


def find_cache_flag(folder: ScaleFolder) -> str:
    """Name the type of the KV cache that the scales are declared to be for; empty for FP8."""
    dtype = _find_recorded_dtype(folder).lower()
    return dtype if dtype == NVFP4_CACHE else ""


def _find_algorithm(folder: ScaleFolder) -> str:
    """Find ModelOpt's name for the format of the cache, in upper case; empty without one."""
    for outer in (folder.config.get("quantization_config"), folder.modelopt):
        nested = find_modelopt_section(outer) if isinstance(outer, dict) else {}
        algorithm, scheme = nested.get("kv_cache_quant_algo"), nested.get("kv_cache_scheme")
        if isinstance(algorithm, str):
            return algorithm.upper()
        is_modelopt = str(nested.get("quant_method", "")).startswith("modelopt")
        if is_modelopt and isinstance(scheme, dict):
            kind = (scheme.get("type"), scheme.get("num_bits"))
            return "FP8" if kind == ("float", 8) else f"{kind[1]!a:.20} bits of {kind[0]!a:.20}"
    return ""


def amend_for_dtype(
    report: EngineReport,
    folder: ScaleFolder,
    *,
    fnuz: str,
    e5m2: str,
    fnuz_device: str = "",
    nvfp4: str = "",
) -> EngineReport:
    """Judge scales as misread that the folder declares to be for another format than e4m3fn.

    Args:
        report: what the engine does with scales for e4m3fn.
        folder: the checkpoint.
        fnuz: what the engine does with a scale for e4m3fnuz.
        e5m2: what it does with one for e5m2.
        fnuz_device: the device on which a scale for e4m3fnuz is used as meant; empty if none.
        nvfp4: what it does with the global scales of an NVFP4 cache; empty where it has none.
    """
    dtype = _find_recorded_dtype(folder)
    if "fnuz" in dtype:
        why, fix = fnuz, "convert the scales to e4m3fn: halve each, and record that dtype"
    elif "e5m2" in dtype:
        why, fix = e5m2, "calibrate for e4m3fn, or serve an e5m2 cache without scales"
    elif dtype.lower() == NVFP4_CACHE:
        if nvfp4:
            return report.add_problems(nvfp4)
        why, fix = _OTHER_CACHE, "export them for an FP8 cache, which takes the same numbers"
    elif dtype:
        why, fix = (
            _OTHER_FORMAT,
            "calibrate for e4m3fn, or serve with the cache format the scales were made for",
        )
    else:
        return report
    text = f"the scales are for {dtype[:40]!a}: {why}"
    only_on = fnuz_device if "fnuz" in dtype and report.ok else ""
    amended = report.change(lambda one: one.misread(text, fix))
    return amended.model_copy(update={"only_on": only_on})
