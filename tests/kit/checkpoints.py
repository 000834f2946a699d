"""Change the files of a checkpoint folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


def load_folder(folder: Path) -> Tensors:
    """Load every tensor of a folder with safetensors' own reader; none is in two files."""
    loaded: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        assert not found.keys() & loaded.keys()
        loaded |= found
    return loaded


def change_json(path: Path, change: Mapping[str, Any] | Callable[[dict[str, Any]], object]) -> Path:
    """Add entries to a JSON object, or edit it in place by a function."""
    document = json.loads(path.read_text())
    if callable(change):
        change(document)
    else:
        document |= change
    path.write_text(json.dumps(document))
    return path


def change_config(
    folder: Path, change: Callable[[dict[str, Any]], object] | None = None, **entries: Any
) -> Path:
    """Change config.json by a function, or add entries to it."""
    change_json(folder / "config.json", change or entries)
    return folder


def change_quantization(folder: Path, **entries: Any) -> Path:
    """Add entries to the quantization config of config.json, which may have none yet."""

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"] = config.get("quantization_config", {}) | entries

    return change_config(folder, change)


def change_tensors(
    folder: Path,
    change: Callable[[Tensors], Tensors | None] | Mapping[str, torch.Tensor | None],
    name: str = WEIGHTS,
) -> Path:
    """Rewrite a file of tensors: by a function, which may edit in place, or by new ones.

    Tensors are replaced, added, or dropped where `change` has None for them.
    """
    tensors = load_file(folder / name)
    if callable(change):
        changed = change(tensors)
        tensors = tensors if changed is None else changed
    else:
        merged = {**tensors, **change}
        tensors = {key: value for key, value in merged.items() if value is not None}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder
