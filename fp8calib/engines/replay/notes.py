"""What is told of the scales of q and of attention's probabilities, which decide no verdict."""

from __future__ import annotations

from fp8calib.dialects.dialect import Spelling
from fp8calib.dialects.kv.tensor_names import is_probability_scale, parse_name
from fp8calib.engines.replay.folder import HeldScale, LoadContext, ScaleFolder
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, LoadVerdict, Status
from fp8calib.engines.replay.vllm_config import KvMethod
from fp8calib.geometry.sites import Role


def list_queries(scene: LoadContext) -> list[HeldScale]:
    """List the scales of q that the engine's files hold."""
    found = ((held, parse_name(name)) for name, held in scene.scales.items())
    return [
        held
        for held, parsed in found
        if parsed is not None
        and parsed.roles == (Role.Q,)
        and parsed.spelling is not Spelling.ZERO_POINT
    ]


def list_zero_points(scene: LoadContext) -> list[HeldScale]:
    """List the zero points of q, k and v that the engine's files hold."""
    found = ((held, parse_name(name)) for name, held in scene.scales.items())
    return [
        held
        for held, parsed in found
        if parsed is not None and parsed.spelling is Spelling.ZERO_POINT
    ]


def list_probabilities(scene: LoadContext) -> list[HeldScale]:
    """List the scales of attention's probabilities that the engine's files hold."""
    return [held for name, held in scene.scales.items() if is_probability_scale(name)]


def note_unread(scene: LoadContext, why: str) -> None:
    """Say that the engine does without these scales, where there are any."""
    for what, found in _both(scene):
        if found:
            scene.problems.append(f"{what} ({len(found)}, such as {found[0]}): {why}")


def note_loaded(scene: LoadContext, method: KvMethod) -> None:
    """Say what vLLM does with these scales, where there are any."""
    for what, found in _both(scene):
        bad = [held for held in found if not all(0 < v < float("inf") for v in held.values)]
        if bad and method is KvMethod.COMPRESSED_TENSORS:
            scene.problems.append(f"{bad[0]} is no scale, and vLLM takes it as it stands")
        elif bad:
            scene.problems.append(f"{bad[0]} is no scale; where it is not above 0, 1.0 is used")
        elif found:
            scene.problems.append(
                f"{what} is loaded ({len(found)}, such as {found[0]}): backends that quantize the "
                "query use it (FlashAttention 3, FlashInfer, Triton on CUDA), others do not"
            )


def _both(scene: LoadContext) -> tuple[tuple[str, list[HeldScale]], ...]:
    return ("q_scale", list_queries(scene)), ("prob_scale", list_probabilities(scene))


_OTHER = "the engine multiplies an FP8 cache by numbers that were made for another format"
_KEYS = ("kv_cache_torch_dtype", "kv_cache_dtype")


def find_recorded_dtype(folder: ScaleFolder) -> str:
    """Give what the folder says its scales are for, in a config or a header; else nothing."""
    named = [folder.config.get(key) for key in _KEYS]
    algorithm = _find_algorithm(folder)
    if algorithm not in ("", "FP8"):
        return algorithm
    found = [value for value in (*named, *folder.recorded.values()) if isinstance(value, str)]
    return next((value for value in found if "fnuz" in value or "e5m2" in value), "")


def _find_algorithm(folder: ScaleFolder) -> str:
    """Give ModelOpt's name of the cache's format, in upper case; empty where there is none."""
    for outer in (folder.config.get("quantization_config"), folder.modelopt):
        nested = outer.get("quantization", outer) if isinstance(outer, dict) else None
        if not isinstance(nested, dict):
            continue
        algorithm, scheme = nested.get("kv_cache_quant_algo"), nested.get("kv_cache_scheme")
        if isinstance(algorithm, str):
            return algorithm.upper()
        is_modelopt = str(nested.get("quant_method", "")).startswith("modelopt")
        if is_modelopt and isinstance(scheme, dict):
            kind = (scheme.get("type"), scheme.get("num_bits"))
            return "FP8" if kind == ("float", 8) else f"{kind[1]!a:.20} bits of {kind[0]!a:.20}"
    return ""


def amend_for_dtype(report: EngineReport, dtype: str, fnuz: str, e5m2: str) -> EngineReport:
    """Turn scales that are used into misread ones where they were made for another format.

    Args:
        report: what the engine does with scales for e4m3fn.
        dtype: what the folder records, for example `float8_e4m3fnuz` or `NVFP4`.
        fnuz: what the engine does with a scale for e4m3fnuz.
        e5m2: what it does with one for e5m2.
    """
    if "fnuz" in dtype:
        why, fix = fnuz, "convert the scales to e4m3fn: half of each, and record that dtype"
    elif "e5m2" in dtype:
        why, fix = e5m2, "calibrate for e4m3fn; engines use no scales with e5m2"
    elif dtype:
        why, fix = _OTHER, "calibrate for e4m3fn, or serve it with the cache it was made for"
    else:
        return report
    text = f"recorded for {dtype[:40]!a}: {why}"
    layers = tuple(
        LayerVerdict(layer=layer.layer, k=_amend(layer.k, text, fix), v=_amend(layer.v, text, fix))
        for layer in report.layers
    )
    return report.model_copy(update={"layers": layers})


def _amend(verdict: LoadVerdict, why: str, fix: str) -> LoadVerdict:
    if verdict.status is not Status.USED:
        return verdict
    return verdict.model_copy(update={"status": Status.MISREAD, "why": why, "fix": fix})
