"""The model card of a written checkpoint: front matter and commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.checkpoint.overlay import CARD_NAME
from fp8calib.commands.command_line import UNTOLD, cut_path, spell_command
from fp8calib.commands.options import Model

_QUANTIZED: dict[str, Any] = {"base_model_relation": "quantized", "quantized_by": "fp8calib"}
_KEPT = ("license", "license_name", "license_link", "language", "tags", "pipeline_tag")
"""Keys of the source's front matter that are true of what is made from it."""


def write_card(
    folder: Path,
    name: str,
    scheme: str,
    model: Model,
    *,
    revision: str | None = None,
    commands: Sequence[str] = (),
    is_quantized: bool = True,
) -> None:
    """Write the card of a checkpoint that is made of `model`. The same run gives the same bytes.

    `name` is what the folder will be called, and `scheme` says how weights or the KV cache are
    stored. `commands` serve it.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base, kept = _name_model(model), dict(_read_front_matter(model, revision))
    if not is_quantized:
        kept.pop("tags", None)  # they tell of the quantization
    data = ModelCardData(
        base_model=base, scheme=scheme, **(_QUANTIZED if is_quantized else {}), **kept
    )
    parts = [f"# {name}\n\n`{scheme}` of {base}, made with fp8calib."]
    made_by = [command] if (command := spell_command()) else []
    for title, lines in (("Made by", made_by), ("Served by", commands)):
        if lines:
            words = ([w for w in shlex.split(line) if w not in UNTOLD] for line in lines)
            shown = "\n".join(shlex.join(map(cut_path, line)) for line in words)
            parts.append(f"{title}:\n\n```sh\n{shown}\n```")
    text = "\n\n".join(parts)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
    write_file_atomic(folder / CARD_NAME, str(card).encode())


def _name_model(model: Model) -> str:
    """Give the Hub id, also of a copy in the Hub's cache, or the name of the folder."""
    if not isinstance(model, str | Path):
        return _name_model(model.name_or_path or type(model).__name__)
    folder = Path(model).resolve()
    if not folder.exists():
        return cut_path(str(model))
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _read_front_matter(model: Model, revision: str | None) -> Iterator[tuple[str, Any]]:
    """Read what the source's README says that is still true; nothing where it cannot be read."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    if not isinstance(model, str | Path):
        return
    path: Any = Path(model) / CARD_NAME
    try:
        if not path.parent.exists():
            path = try_to_load_from_cache(str(model), CARD_NAME, revision=revision)
        found = metadata_load(path) or {}
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return
    for key in _KEPT:
        if isinstance(found.get(key), list if key == "tags" else str | list):
            yield key, found[key]
