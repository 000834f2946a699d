"""What a folder declares: its quantization config, the format of its scales, its dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import EngineReport, Refusal
from fp8calib.engines.status import Status
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.module_paths import matches_expression
from fp8calib.numerics.formats import NVFP4_CACHE


def matches_target(target: object, *names: str) -> bool:
    """Check whether a target of a config is one of the names, or as `re:...` matches the start.

    Names are the path of a module, and its class where the engine compares that too. An expression
    that is invalid, or could take exponential time, is refused.
    """
    if not isinstance(target, str):
        return False
    if not target.startswith("re:"):
        return target in names
    pattern = target.removeprefix("re:")
    try:
        return matches_expression(pattern, *names)
    except ValueError as error:
        fix = "name modules by their paths, or by a plain regular expression"
        raise Refusal(f"target {target!a:.60}: {error}", fix=fix) from error


METHODS_FIX = (
    "use a checkpoint in compressed-tensors (which also stores INT4 and INT8 weights), fp8, "
    "ModelOpt or Quark, or a kv-overlay of the unquantized model"
)
"""For a method of quantization beside which vLLM and SGLang have no place for KV scales."""
CONFIG_KEYS = (
    "quantization_config",
    "modelopt",
    "text_config.quantization_config",
    "compression_config",
)
"""Where vLLM looks for the quantization config, in order."""


def find_quantization(folder: ScaleFolder, *, keys: tuple[str, ...]) -> Mapping[str, object] | None:
    """Find the quantization config of a folder in the places and the order of an engine.

    Keys are `modelopt` for `hf_quant_config.json`, else those of config.json; `text_config.KEY` is
    a key of its text part. What is not an object is refused.
    """
    for key in keys:
        outer, _, inner = key.rpartition(".")
        section = folder.config.get(outer) if outer else folder.config
        found = section.get(inner) if isinstance(section, Mapping) else None
        if key == "modelopt":
            found = folder.modelopt
        if found is None:
            continue
        if not isinstance(found, dict):
            raise Refusal(f"{key} is not an object", fix="write it as a JSON object")
        return found
    return None


def find_modelopt_section(quantization: Mapping[str, object]) -> Mapping[str, object]:
    """Find the part of ModelOpt's config that names the algorithm: nested in its own file."""
    nested = quantization.get("quantization", quantization)
    return nested if isinstance(nested, dict) else {}


# --- formats and dtypes --------------------------------------------------------------------------

_KEYS = ("kv_cache_torch_dtype", "kv_cache_dtype")
_OTHER_FORMAT = "the engine multiplies an FP8 cache by scales that were made for another format"
_OTHER_FIX = "calibrate for e4m3fn, or serve with the cache format the scales were made for"
_READS = "drafter reads the KV cache of this model type"


def find_recorded_dtype(folder: ScaleFolder) -> str:
    """Find the format that a config or a header names for the scales; empty for e4m3fn."""
    for outer in (folder.config.get("quantization_config"), folder.modelopt):
        section = find_modelopt_section(outer) if isinstance(outer, dict) else {}
        algorithm, scheme = section.get("kv_cache_quant_algo"), section.get("kv_cache_scheme")
        if isinstance(algorithm, str):
            algorithm = algorithm.upper()
        elif isinstance(scheme, dict) and str(section.get("quant_method")).startswith("modelopt"):
            bits, kind = scheme.get("num_bits"), scheme.get("type")
            algorithm = (
                "FP8" if (bits, kind) == (8, "float") else f"{bits!a:.20} bits of {kind!a:.20}"
            )
        else:
            continue
        if algorithm not in ("", "FP8"):
            return algorithm
        break
    named = (*(folder.config.get(key) for key in _KEYS), *folder.recorded.values())
    found = [value for value in named if isinstance(value, str)]
    return next((x for x in found if "fnuz" in x or "e5m2" in x or x == NVFP4_CACHE), "")


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

    The report is for those. `fnuz`, `e5m2` and `nvfp4` say what the engine does with scales for
    these formats (empty if it has no such cache); `fnuz_device` where those for e4m3fnuz are right.
    """
    dtype = find_recorded_dtype(folder)
    if not dtype:
        return report
    why, fix = _OTHER_FORMAT, _OTHER_FIX
    if "fnuz" in dtype:
        why, fix = fnuz, "convert the scales to e4m3fn: halve each, and record that dtype"
    elif "e5m2" in dtype:
        why, fix = e5m2, "calibrate for e4m3fn, or serve an e5m2 cache without scales"
    elif dtype.lower() == NVFP4_CACHE:
        if nvfp4:
            return report.add(problems=[nvfp4])
        why = "this engine has no such KV cache"
        fix = "export them for an FP8 cache, which takes the same numbers"
    text = f"the scales are for {dtype[:40]!a}: {why}"
    only_on = fnuz_device if "fnuz" in dtype and report.ok else ""
    amended = report.mark(dict.fromkeys(report.slots, text), fix)
    return amended.model_copy(update={"only_on": only_on})


def note_drafter(
    report: EngineReport, geometry: ModelGeometry, release: Release, *, given_by: Sequence[str] = ()
) -> EngineReport:
    """Note that a drafter of such a model reads scaled K and V with 1.0.

    `given_by` are the parts of the engine that give the drafter the model's scales.
    """
    is_scaled = any(one.status is Status.USED and one.value != 1.0 for one in report.slots.values())
    if not release.has(_READS, geometry.model_type) or not is_scaled:
        return report
    but = f"; only {', '.join(given_by)} gives it the scales" if given_by else ""
    note = f"a Gemma 4 drafter (MTP) reads this cache with 1.0: fewer tokens are accepted{but}"
    return report.add(problems=[note])
