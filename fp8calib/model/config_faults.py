"""Find what the libraries that engines use refuse in the JSON files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import CONFIG_MAPPING, GenerationConfig

from fp8calib.checkpoint.model_config import find_quantization_configs
from fp8calib.errors import shorten
from fp8calib.model.geometry_from_config import restore_floats

_GENERATION = "generation_config.json"
_HEAD_DIM = "head_dim"


def find_config_fault(config: Mapping[str, object]) -> str:
    """Say why the installed transformers refuses a config.json; empty where it does not."""
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return ""
    return _try(lambda: CONFIG_MAPPING[model_type].from_dict(restore_floats(config)))


def list_other_faults(folder: Path, config: Mapping[str, object]) -> Iterator[str]:
    """List what transformers and compressed-tensors, as installed, refuse beside that.

    Also a null that the model's class does not replace: each engine's class does in its own way.
    """
    if _has_null_head_dim(config):
        yield "config.json says head_dim: null, and an engine may compute with it"
    if (folder / _GENERATION).is_file():
        yield _prefix(f"transformers refuses {_GENERATION}", _try(partial(_generate, folder)))
    for key, section in islice(find_quantization_configs(config), 1):
        if str(section.get("quant_method")).replace("_", "-") == "compressed-tensors":
            yield _prefix(f"compressed-tensors refuses {key}", _try(partial(_parse, section)))


def _has_null_head_dim(config: Mapping[str, object]) -> bool:
    model_type = str(config.get("model_type"))
    if config.get(_HEAD_DIM, 0) is not None or model_type not in CONFIG_MAPPING:
        return False
    made = CONFIG_MAPPING[model_type]
    if getattr(made(), _HEAD_DIM, 0) is None or find_config_fault(config):
        return False
    return getattr(made.from_dict(restore_floats(config)), _HEAD_DIM, 0) is None


def _prefix(what: str, why: str) -> str:
    return f"{what}: {why}" if why else ""


def _generate(folder: Path) -> None:
    GenerationConfig.from_pretrained(folder, local_files_only=True).validate()


def _parse(section: Mapping[str, object]) -> None:
    from compressed_tensors.quantization import (  # type: ignore[import-untyped]  # noqa: PLC0415
        QuantizationConfig,
    )

    QuantizationConfig.model_validate({**section})


def _try(act: Callable[[], object]) -> str:
    """Give the error of another library as one line; empty without one."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 -- whatever the library raises is its answer
        return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
    return ""
