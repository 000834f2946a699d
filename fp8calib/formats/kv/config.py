"""Read what a checkpoint's configs state about its KV scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp8calib.checkpoint.json_files import load_json_object, parse_unique_keys
from fp8calib.checkpoint.locations import refuse_external_link
from fp8calib.checkpoint.model_config import CONFIG_NAME, MODELOPT_CONFIG_NAME
from fp8calib.errors import refusal
from fp8calib.formats.dialect import ScaleFiles
from fp8calib.formats.kv.validate import check_model_type
from fp8calib.formats.metadata import find_format
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.formats import E4M3FN, Fp8Format

_TGI_DTYPE_KEY = "kv_cache_torch_dtype"
_ALGORITHM_KEY = "kv_cache_quant_algo"
_ALGORITHM_SECTIONS = ("quantization", "quantization_config")
_STRATEGIES = ("tensor", "attn_head")
_WANTED = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
SCHEME_HINT = "symmetric float of 8 bits, strategy tensor or attn_head"


def load_config(path: Path) -> dict[str, object] | None:
    """Load a config beside scales; None if there is none."""
    refuse_external_link(path)
    return load_json_object(path, parse=parse_unique_keys) if path.is_file() else None


def read_config(files: ScaleFiles, geometry: ModelGeometry) -> tuple[Fp8Format | None, int | None]:
    """Read the configs beside scales, if there are any, and check that the scales are for FP8.

    Returns:
        The FP8 format, by TGI's key or by the algorithm that NVIDIA's tools name; and the number of
        rank files of a TensorRT-LLM checkpoint. Each is None if config.json does not have it.
    """
    folder = files.place if files.place.is_dir() else files.place.parent
    path, side = folder / CONFIG_NAME, folder / MODELOPT_CONFIG_NAME
    _find_algorithm(side, load_config(side) or {})
    config = files.config or {}
    is_decoder = not any(key.endswith("_config") and key != "quantization_config" for key in config)
    if is_decoder:  # otherwise the decoder's config is inside it, with a model_type of its own
        check_model_type(path, config.get("model_type"), geometry)
    fmt = _find_algorithm(path, config)
    scheme = _section(config, "quantization_config").get("kv_cache_scheme")
    if files.quant_method == "compressed-tensors":
        check_scheme(path, scheme)
    elif isinstance(scheme, dict):  # other methods name only the numbers; AutoFP8 says `static`
        check_scheme(path, {key: scheme[key] for key in ("type", "num_bits") if key in scheme})
    if (dtype := config.get(_TGI_DTYPE_KEY)) is not None:
        fmt = find_format(path, _TGI_DTYPE_KEY, dtype)
    tp = _section(config, "mapping").get("tp_size")
    return fmt, tp if type(tp) is int else None


def _section(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def find_scheme_fault(scheme: object) -> str:
    """Find an entry of compressed-tensors' `kv_cache_scheme` that rules out an FP8 cache.

    vLLM 0.32.0 `compressed_tensors/compressed_tensors.py` (validate_kv_cache_scheme), run.
    """
    if scheme is None:
        return ""
    if not isinstance(scheme, dict):
        return "kv_cache_scheme is not an object"
    faults = {
        "type": scheme.get("type") != "float",
        "num_bits": scheme.get("num_bits") != 8,
        "strategy": scheme.get("strategy") not in _STRATEGIES,
        "symmetric": not scheme.get("symmetric"),
    }
    wrong = (key for key, is_wrong in faults.items() if is_wrong)
    return next((f"kv_cache_scheme.{key} is {scheme.get(key)!a:.40}" for key in wrong), "")


def check_scheme(path: Path, scheme: object) -> None:
    """Refuse a `kv_cache_scheme` of compressed-tensors that rules out an FP8 cache.

    Missing entries are accepted: only some engines need them.
    """
    whole = {**_WANTED, **scheme} if isinstance(scheme, dict) else scheme
    if fault := find_scheme_fault(whole):
        raise refusal(path, fault, hint=SCHEME_HINT)


def _find_algorithm(path: Path, config: Mapping[str, object]) -> Fp8Format | None:
    """Read `kv_cache_quant_algo`; FP8, in any case, is e4m3fn, the only e4m3 of NVIDIA's tools.

    The other formats of ModelOpt and TensorRT-LLM are refused: INT8 scales are amax / 127.
    """
    found = (_section(config, name).get(_ALGORITHM_KEY) for name in _ALGORITHM_SECTIONS)
    named = [algorithm for algorithm in found if algorithm is not None]
    for algorithm in named:
        if str(algorithm).upper() != "FP8":
            hint = "only scales for FP8 can be used; calibrate the model for FP8"
            raise refusal(path, f"{_ALGORITHM_KEY} is {algorithm!a:.40}, not FP8", hint=hint)
    return E4M3FN if named else None
