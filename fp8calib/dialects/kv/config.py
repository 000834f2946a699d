"""Read what a checkpoint's configs state about its KV scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.checkpoint.json_files import load_json_object, parse_unique_keys
from fp8calib.checkpoint.links import refuse_external_link
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.dialects.kv.validate import check_model_type
from fp8calib.dialects.metadata import find_format
from fp8calib.dialects.refusals import reading_errors, refusal
from fp8calib.fp8.formats import E4M3FN, Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry

MODELOPT_CONFIG_NAME = "hf_quant_config.json"
_TGI_DTYPE_KEY = "kv_cache_torch_dtype"
_ALGORITHM_KEY = "kv_cache_quant_algo"
_ALGORITHM_SECTIONS = ("quantization", "quantization_config")
_NOT_FP8 = "only scales for FP8 can be used; calibrate the model for FP8"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """The facts in a checkpoint's config that its scales depend on."""

    fmt: Fp8Format | None = None
    """The FP8 format, by TGI's key or by the algorithm that NVIDIA's tools name."""
    tp: int | None = None
    """The number of rank files of a TensorRT-LLM checkpoint."""


def read_config(folder: Path, geometry: ModelGeometry) -> CheckpointConfig:
    """Read a folder's configs, if it has any, and check that its KV scales are for FP8.

    Raises:
        VerificationError: a config cannot be read, is of another model, or of another KV format.
    """
    path, side = folder / CONFIG_NAME, folder / MODELOPT_CONFIG_NAME
    with reading_errors():
        refuse_external_link(path)
        refuse_external_link(side)
    _check_algorithm(side, _load(side))
    if not path.is_file():
        return CheckpointConfig()
    config = load_object(path)
    _check_model_type(path, config, geometry)
    _check_algorithm(path, config)
    quantization = _section(config, "quantization_config")
    _check_scheme(path, quantization.get("kv_cache_scheme"))
    dtype = config.get(_TGI_DTYPE_KEY)
    tp = _section(config, "mapping").get("tp_size")
    return CheckpointConfig(
        fmt=_find_algorithm(config) if dtype is None else find_format(path, _TGI_DTYPE_KEY, dtype),
        tp=tp if type(tp) is int else None,
    )


def read_quant_method(folder: Path) -> str | None:
    """Read the method that the `quantization_config` names; None if there is no config.

    Raises:
        VerificationError: the config cannot be read.
    """
    path = folder / CONFIG_NAME
    with reading_errors():
        refuse_external_link(path)
    if not path.is_file():
        return None
    method = _section(load_object(path), "quantization_config").get("quant_method")
    return method if isinstance(method, str) else ""


def load_object(path: Path) -> dict[str, object]:
    """Load a JSON object in which no key occurs twice.

    Raises:
        VerificationError: the file cannot be read, or is not such an object.
    """
    with reading_errors():
        return load_json_object(path, parse=parse_unique_keys)


def _load(path: Path) -> dict[str, object]:
    return load_object(path) if path.is_file() else {}


def _section(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _check_model_type(path: Path, config: Mapping[str, object], geometry: ModelGeometry) -> None:
    """Compare the model types, unless the config wraps that of the decoder."""
    if not any(key.endswith("_config") and key != "quantization_config" for key in config):
        check_model_type(path, config.get("model_type"), geometry)


def _check_scheme(path: Path, scheme: object) -> None:
    """Refuse scales of another format; AutoFP8's `static` names none."""
    if not isinstance(scheme, dict):
        return
    kind, num_bits = scheme.get("type", "float"), scheme.get("num_bits", 8)
    if (kind, num_bits) != ("float", 8):
        fault = f"kv_cache_scheme is {num_bits!a:.20} bits of {kind!a:.20}, not FP8"
        raise refusal(path, fault, hint=_NOT_FP8)


def _find_algorithm(config: Mapping[str, object]) -> Fp8Format | None:
    """Read `kv_cache_quant_algo`: FP8 is e4m3fn, the only e4m3 of NVIDIA's tools."""
    sections = [_section(config, name) for name in _ALGORITHM_SECTIONS]
    return E4M3FN if any(_is_fp8(section.get(_ALGORITHM_KEY)) for section in sections) else None


def _is_fp8(algorithm: object) -> bool:
    """Tell whether an algorithm is FP8, in upper or lower case, as engines read it."""
    return isinstance(algorithm, str) and algorithm.upper() == "FP8"


def _check_algorithm(path: Path, config: Mapping[str, object]) -> None:
    """Refuse the other KV formats of ModelOpt and TensorRT-LLM: INT8 scales are amax / 127."""
    for section in _ALGORITHM_SECTIONS:
        algorithm = _section(config, section).get(_ALGORITHM_KEY)
        if algorithm is not None and not _is_fp8(algorithm):
            fault = f"kv_cache_quant_algo is {algorithm!a:.40}, not FP8"
            raise refusal(path, fault, hint=_NOT_FP8)
