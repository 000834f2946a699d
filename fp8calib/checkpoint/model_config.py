"""The keys of a checkpoint's config.json that several readers use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"
MODELOPT_CONFIG_NAME = "hf_quant_config.json"
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys that state how many layers the model has."""
MAX_LAYERS = 1000
"""The largest number of layers that is believed."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
TEXT_KEYS = ("text_config", "llm_config", "language_config")


def list_inner_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder's subfolders; empty if the folder is itself a checkpoint."""
    if not folder.is_dir() or (folder / CONFIG_NAME).exists():
        return []
    return sorted(config.parent for config in folder.glob(f"*/{CONFIG_NAME}"))


def list_classes(config: Mapping[str, object]) -> list[str]:
    """List the classes that a config names."""
    names = config.get("architectures")
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []


def find_class(config: Mapping[str, object], pattern: re.Pattern[str]) -> str:
    """Find a class of the config whose name has a pattern; empty if there is none."""
    return next(filter(pattern.search, list_classes(config)), "")


def list_text_configs(
    config: Mapping[str, object],
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """List a config, by an empty key, and the text models' configs in it, by their keys."""
    yield "", config
    for key in TEXT_KEYS:
        if isinstance(part := config.get(key), dict):
            yield key, part


def let_layers_differ(config: Any) -> Any:
    """Let a config of transformers be read whose layers differ: shapes are those of modules."""
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "is_heterogeneous", False):
            part.allow_global_per_layer_attribute_access = True
    return config


def find_quantization_configs(
    config: Mapping[str, object],
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Find the sections of a config that describe a quantization: key and section."""
    for _, owner in list_text_configs(config):
        for key in QUANTIZATION_KEYS:
            section = owner.get(key)
            if isinstance(section, dict):
                yield key, section


def find_dtype(config: Mapping[str, object]) -> str:
    """Name the dtype that a config gives the model, without `torch.`; empty if it gives none.

    The outermost one counts, then the text model's, as in vLLM 0.32
    (`model_arch_config_convertor.py` `get_torch_dtype`).
    """
    for _, section in list_text_configs(config):
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if isinstance(value, str) and value not in ("", "auto"):
                return value.removeprefix("torch.")
    return ""


def replace_dtype(config: Mapping[str, object], name: str) -> dict[str, object]:
    """Copy a config with another dtype of the model, and of the text model in it."""
    if find_dtype(config) == name:
        return dict(config)
    replaced: dict[str, object] = {"dtype": name} if "torch_dtype" not in config else {}
    for owner, section in list_text_configs(config):
        named = {key: name for key in ("dtype", "torch_dtype") if key in section}
        replaced |= {owner: {**section, **named}} if owner else named
    return {**config, **replaced}


def replace_quantization(
    config: Mapping[str, object], section: Mapping[str, object]
) -> dict[str, object]:
    """Give the top-level entries that replace a config's first quantization section by `section`.

    They are empty if the config has no such section.
    """
    for owner, part in list_text_configs(config):
        for key in QUANTIZATION_KEYS:
            if isinstance(part.get(key), dict):
                return {owner: {**part, key: section}} if owner else {key: section}
    return {}


def without_quantization(config: Mapping[str, object]) -> dict[str, object]:
    """Copy a config without the sections that describe a quantization, at any depth."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }
