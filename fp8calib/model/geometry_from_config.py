"""The geometry of a model that may be quantized, or damaged, from its config and tensor names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.fp8.quantization_config import QUANTIZATION_KEYS
from fp8calib.errors import Fp8CalibError, ModelError, shorten
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.dtype import DTYPES, stored_dtype
from fp8calib.model.load import LoadedModel, ModelSource, build_skeleton
from fp8calib.model.topology.find import find_geometry
from fp8calib.model.weight_source import WeightSource

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MAX_LAYERS = 1000
_MAX_SIZE = 1 << 31
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""What transformers 5 writes as {"__float__": NAME}, for JSON has no word for it."""


def read_geometry(folder: Path, config: Mapping[str, object]) -> ModelGeometry:
    """Find the geometry of the model a config describes; the folder tells how tensors are called.

    Tensors that cannot be found in the folder are taken to be called as in the model.

    Raises:
        ModelError: the config is not one of a decoder-only model that transformers can build.
    """
    source = _make_source(folder, config)
    skeleton = build_skeleton(source)
    checkpoint = _open_leniently(folder)
    names = {name: name for name in skeleton.state_dict()}
    names |= _find_names(skeleton, checkpoint)
    dtype = _find_dtype(config) or stored_dtype(checkpoint)
    dtype = dtype if dtype in DTYPES else "bfloat16"
    try:
        return find_geometry(skeleton, names, checkpoint_dtype=dtype)[0]
    except Fp8CalibError:
        raise
    except Exception as error:
        raise _misfit(folder, error) from error


def is_known(config: Mapping[str, object]) -> bool:
    """Tell whether transformers itself has the model type, so that its layers are known."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 -- floor 2's library

    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _make_source(folder: Path, config: Mapping[str, object]) -> ModelSource:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 -- floor 2's library

    try:
        plain = _strip(config)
    except RecursionError as error:
        raise _misfit(folder, ValueError("it is nested too deeply")) from error
    if not is_known(plain):
        named = f"model_type {plain.get('model_type')!a:.60} is unknown to this tool"
        fault = named if config else "there is no config.json"
        raise ModelError(
            f"{folder}: {fault}, so the model's layers are not known",
            hint="--model names the model the scales are for",
        )
    for section in _sections(plain):
        _check_sizes(folder, section)
    try:
        parsed = CONFIG_MAPPING[str(plain["model_type"])].from_dict(plain)
    except Exception as error:
        raise _misfit(folder, error) from error
    return ModelSource(folder=folder, config=parsed, raw_config=plain, trust_remote_code=False)


def _strip(config: Mapping[str, object]) -> dict[str, Any]:
    """Leave out how the model is quantized, which says nothing about its shape."""
    return {key: _restore(value) for key, value in config.items() if key not in QUANTIZATION_KEYS}


def _restore(value: object) -> Any:
    """Put the numbers back that transformers writes as objects, at any depth."""
    if isinstance(value, list):
        return [_restore(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    name = value.get("__float__") if len(value) == 1 else None
    return _FLOATS[name] if isinstance(name, str) and name in _FLOATS else _strip(value)


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    yield from (value for value in config.values() if isinstance(value, Mapping))


def _check_sizes(folder: Path, section: Mapping[str, Any]) -> None:
    """Refuse sizes no model has before a model of that size is described in memory."""
    for key, value in section.items():
        most = _MAX_LAYERS if key in _LAYER_KEYS else _MAX_SIZE
        if type(value) is int and abs(value) > most:
            hint = "take the config.json that the model was published with"
            raise ModelError(f"{folder}/config.json: {key!a:.60} is too large", hint=hint)


def _misfit(folder: Path, error: Exception) -> ModelError:
    first = shorten(str(error).strip().partition("\n")[0]) or type(error).__name__
    hint = "take the config.json that the model was published with, or pass --model"
    return ModelError(f"{folder}/config.json: transformers cannot use it: {first}", hint=hint)


def _open_leniently(folder: Path) -> Checkpoint:
    """Open every weight file whose header can be read, index or not."""
    files: dict[str, TensorFile] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            files[path.name] = TensorFile(path)
        except ModelError:
            continue
    return Checkpoint(folder, files=files, index=None)


def _find_names(skeleton: LoadedModel, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Match parameters and tensors; in a quantized checkpoint some have no whole tensor."""
    try:
        return WeightSource(skeleton, checkpoint).single_tensors
    except Exception as error:
        raise _misfit(checkpoint.folder, error) from error


def _find_dtype(config: Mapping[str, object]) -> str:
    for section in _sections(config):
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return ""
