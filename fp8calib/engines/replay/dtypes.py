"""The formats that scales are declared to be for, and the dtypes that models are served in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.quantization_config import find_modelopt_section
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.model.shapes import ModelGeometry
from fp8calib.numerics.formats import NVFP4_CACHE

_KEYS = ("kv_cache_torch_dtype", "kv_cache_dtype")
_OTHER_FORMAT = "the engine multiplies an FP8 cache by scales that were made for another format"
_OTHER_FIX = "calibrate for e4m3fn, or serve with the cache format the scales were made for"
_READS = "drafter reads the KV cache of this model type"


def _find_recorded_dtype(folder: ScaleFolder) -> str:
    """Find the format that a config or a header names for the scales; empty for e4m3fn."""
    algorithm = next(_list_algorithms(folder), "")
    if algorithm not in ("", "FP8"):
        return algorithm
    named = (*(folder.config.get(key) for key in _KEYS), *folder.recorded.values())
    found = [value for value in named if isinstance(value, str)]
    return next((x for x in found if "fnuz" in x or "e5m2" in x or x == NVFP4_CACHE), "")


def find_cache_flag(folder: ScaleFolder) -> str:
    """Name the type of the KV cache that the scales are declared to be for; empty for FP8."""
    dtype = _find_recorded_dtype(folder).lower()
    return dtype if dtype == NVFP4_CACHE else ""


def _list_algorithms(folder: ScaleFolder) -> Iterator[str]:
    """List ModelOpt's names for the format of the cache, in upper case."""
    for outer in (folder.config.get("quantization_config"), folder.modelopt):
        nested = find_modelopt_section(outer) if isinstance(outer, dict) else {}
        algorithm, scheme = nested.get("kv_cache_quant_algo"), nested.get("kv_cache_scheme")
        if isinstance(algorithm, str):
            yield algorithm.upper()
        elif isinstance(scheme, dict) and str(nested.get("quant_method")).startswith("modelopt"):
            kind = (scheme.get("type"), scheme.get("num_bits"))
            yield "FP8" if kind == ("float", 8) else f"{kind[1]!a:.20} bits of {kind[0]!a:.20}"


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
    if not dtype:
        return report
    why, fix = _OTHER_FORMAT, _OTHER_FIX
    if "fnuz" in dtype:
        why, fix = fnuz, "convert the scales to e4m3fn: halve each, and record that dtype"
    elif "e5m2" in dtype:
        why, fix = e5m2, "calibrate for e4m3fn, or serve an e5m2 cache without scales"
    elif dtype.lower() == NVFP4_CACHE:
        if nvfp4:
            return report.add_problems(nvfp4)
        why = "this engine has no such KV cache"
        fix = "export them for an FP8 cache, which takes the same numbers"
    text = f"the scales are for {dtype[:40]!a}: {why}"
    only_on = fnuz_device if "fnuz" in dtype and report.ok else ""
    amended = report.change(lambda one: one.misread(text, fix))
    return amended.model_copy(update={"only_on": only_on})


def note_drafter(
    report: EngineReport, geometry: ModelGeometry, release: Release, *, given_by: Sequence[str] = ()
) -> EngineReport:
    """Note that a drafter of such a model reads scaled K and V with 1.0.

    `given_by` are the parts of the engine that give the drafter the model's scales.
    """
    is_scaled = any(one.status is Status.USED and one.value != 1.0 for one in report.verdicts)
    if geometry.model_type not in release.list_values(_READS) or not is_scaled:
        return report
    but = f"; only {', '.join(given_by)} gives it the scales" if given_by else ""
    return report.add_problems(
        f"a Gemma 4 drafter (MTP) reads this cache with scale 1.0, so that fewer of its tokens are "
        f"accepted{but}"
    )


def find_served_dtype(
    geometry: ModelGeometry,
    *,
    bfloat16_types: tuple[str, ...] = (),
    half_instead_of: tuple[str, ...] = ("float16",),
) -> str:
    """Name the 16-bit dtype a model is served in; fp32 checkpoints are served in bfloat16.

    Args:
        geometry: the model.
        bfloat16_types: types that are served in bfloat16 even if the checkpoint is in float16.
        half_instead_of: the dtypes of checkpoints that are served in float16.
    """
    is_half = geometry.checkpoint_dtype in half_instead_of
    return "float16" if is_half and geometry.model_type not in bfloat16_types else "bfloat16"
