"""What the front matter of a card takes from the model that the folder was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.errors import ModelError

_LICENCE_KEYS = ("license", "license_name", "license_link")
_TEXT = "text-generation"
_IMAGES = "image-text-to-text"


def read_source_fields(folder: Path, source: Path | None, base: str) -> dict[str, Any]:
    """Read licence and `pipeline_tag`; without a README, the tag of the model's class.

    The README is that of the unquantized model (`source`, or the copy of `base` in the cache of the
    Hub), else the one that was copied into `folder`. Nothing is downloaded.
    """
    matter = next(filter(None, map(_read_front_matter, _list_readmes(folder, source, base))), {})
    fields = {key: matter[key] for key in _LICENCE_KEYS if isinstance(matter.get(key), str | list)}
    tag = matter.get("pipeline_tag")
    tag = tag if isinstance(tag, str) else _find_tag(folder)
    return fields | ({"pipeline_tag": tag} if tag else {})


def _list_readmes(folder: Path, source: Path | None, base: str) -> Iterator[Path]:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 -- slow to import

    if source is not None:
        yield source / "README.md"
    cached = try_to_load_from_cache(base, "README.md")
    if isinstance(cached, str):
        yield Path(cached)
    yield folder / "README.md"


def _read_front_matter(path: Path) -> dict[str, Any]:
    """Read the YAML at the beginning of a README; empty where there is none that can be read."""
    try:
        parts = path.read_text(encoding="utf-8").split("---\n", 2)
        matter = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return matter if isinstance(matter, dict) else {}


def _find_tag(folder: Path) -> str:
    """Find the task of the class in the config; empty where it is not known."""
    try:
        config = load_json_object(folder / CONFIG_NAME)
    except ModelError:
        return ""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if "vision_config" in config and name.endswith("ForConditionalGeneration"):
        return _IMAGES
    return _TEXT if name.endswith(("ForCausalLM", "LMHeadModel")) else ""
