"""The model card of a written checkpoint: front matter and commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.checkpoint.overlay import CARD_NAME
from fp8calib.commands.command_line import cut_path, publish_command, spell_command
from fp8calib.commands.options import Model

_QUANTIZED: dict[str, Any] = {"base_model_relation": "quantized", "quantized_by": "fp8calib"}
_KEPT = ("license", "license_name", "license_link", "language", "tags", "pipeline_tag")
"""Keys of the source's front matter that are true of what is made from it."""


def write_card(
    written: Path,
    target: Path,
    scheme: str,
    model: Model,
    *,
    path: str = ".",
    revision: str | None = None,
    commands: Sequence[str] = (),
    is_quantized: bool = True,
) -> str:
    """Write the card of a checkpoint, and give its name. The same run gives the same bytes.

    Args:
        written: the output folder where it is now.
        target: the output folder where it will be.
        scheme: how weights or the KV cache are stored.
        model: what the checkpoint was made from.
        path: of the checkpoint in the output folder.
        revision: that of a model on the Hub.
        commands: what serves it.
        is_quantized: whether weights or the KV cache are.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base, name = _name_model(model), (target / path).resolve().name
    kept = dict(_read_front_matter(model, revision))
    if not is_quantized:
        kept.pop("tags", None)  # they tell of the quantization
    data = ModelCardData(
        base_model=base, scheme=scheme, **(_QUANTIZED if is_quantized else {}), **kept
    )
    parts = (
        f"# {name}\n\n`{scheme}` of {base}, made with fp8calib.",
        _quote("Made by", [spell_command()]),
        _quote("Served by", commands),
    )
    text = "\n\n".join(filter(None, parts))
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
    write_file_atomic(written / path / CARD_NAME, str(card).encode())
    return (Path(path) / CARD_NAME).as_posix()


def _quote(title: str, commands: Iterable[str]) -> str:
    shown = "\n".join(map(publish_command, filter(None, commands)))
    return f"{title}:\n\n```sh\n{shown}\n```" if shown else ""


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
