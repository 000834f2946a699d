"""Which files of a folder are the weights, and what to say when none are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fp8calib.checkpoint.json_files import load_json_object, parse_strict
from fp8calib.errors import ModelError, shorten

SINGLE_FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_ADAPTER_NAME = "adapter_model.safetensors"
_SERIES = re.compile(r"-\d+-of-\d+\.safetensors$")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_NO_PICKLED_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt"})


@dataclass(frozen=True)
class WeightIndex:
    """What `model.safetensors.index.json` says: which file holds which tensor."""

    path: Path
    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]


def find_weights(folder: Path) -> tuple[tuple[str, ...], WeightIndex | None]:
    """Name the weight files of a folder, sorted, and give the index when it decides.

    `model.safetensors` goes before an index, as in transformers. Without both, one file alone is
    taken as vLLM takes it, unless its name says that it is a part or an adapter.

    Raises:
        ModelError: the folder holds no safetensors weights, or not all of them.
    """
    names = _list_names(folder)
    if SINGLE_FILE_NAME in names:
        return (SINGLE_FILE_NAME,), None
    if INDEX_NAME in names:
        index = read_index(folder / INDEX_NAME)
        files = sorted(set(index.weight_map.values()))
        _check_present(index, files)
        return tuple(files), index
    weights = [name for name in names if name.endswith(".safetensors") and name != _ADAPTER_NAME]
    if not weights:
        raise _explain_no_weights(folder, names)
    if len(weights) > 1 or _is_one_of_several(weights[0]):
        message = f"{folder}: {INDEX_NAME} is missing, though there is {_shorten(weights)}"
        raise ModelError(message, hint="download the index, which says where each tensor is")
    return (weights[0],), None


def read_index(path: Path) -> WeightIndex:
    """Read and check an index; that its files exist is not asked here.

    Raises:
        ModelError: it is not JSON, has no weight_map, or names something that is no shard.
    """
    document = load_json_object(path, parse=parse_strict)
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: there is no weight_map that says where the tensors are")
    for name, file_name in weight_map.items():
        if not _is_shard_name(file_name):
            message = f"{path}: the tensor {name!a:.200} points to {file_name!a:.200}"
            raise ModelError(message, hint="a shard is a *.safetensors file beside the index")
    metadata = metadata if isinstance(metadata, dict) else {}
    return WeightIndex(path, MappingProxyType(weight_map), MappingProxyType(metadata))


def _list_names(folder: Path) -> list[str]:
    if not folder.exists():
        hint = "name a folder that holds a model, or the hub id of one"
        raise ModelError(f"{folder}: no such folder", hint=hint)
    if not folder.is_dir():
        message = f"{folder}: a file, not a model folder"
        raise ModelError(message, hint="name the folder the weights lie in")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {error.strerror}") from error
    if not names:
        raise ModelError(f"{folder}: the folder is empty", hint="download the model first")
    return names


def _is_shard_name(name: object) -> bool:
    """Take plain file names only: engines read a folder's top level, and nothing may lead out."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not any(character in name for character in "/\\\0")
        and not name.startswith(".")
    )


def _check_present(index: WeightIndex, files: Collection[str]) -> None:
    missing = [name for name in files if not (index.path.parent / name).is_file()]
    if missing:
        message = f"{index.path}: {len(missing)} of {len(files)} shards are missing: "
        raise ModelError(message + _shorten(missing), hint="the download is not complete")


def _is_one_of_several(name: str) -> bool:
    return bool(_SERIES.search(name)) and not name.endswith("-00001-of-00001.safetensors")


def _explain_no_weights(folder: Path, names: Collection[str]) -> ModelError:
    pickled = [
        name
        for name in names
        if Path(name).suffix in _PICKLE_SUFFIXES and name not in _NO_PICKLED_WEIGHTS
    ]
    packed = [name for name in names if name.endswith(".gguf")]
    if _ADAPTER_NAME in names:
        message = f"{folder}: {_ADAPTER_NAME} is an adapter, not a model"
        return ModelError(message, hint="merge it into its base model and save that")
    if pickled:
        message = f"{folder}: the weights are pickled ({_shorten(pickled)}), which is not read"
        return ModelError(message, hint=_conversion_hint(folder))
    if packed:
        message = f"{folder}: the weights are GGUF ({_shorten(packed)}), which is not read"
        return ModelError(message, hint="take the safetensors repository the GGUF was made from")
    message = f"{folder}: there are no *.safetensors weights"
    return ModelError(message, hint=f"expected {SINGLE_FILE_NAME} or {INDEX_NAME} with its shards")


def _conversion_hint(folder: Path) -> str:
    return (
        'convert them: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained('converted')\""
        ", then copy the tokenizer files"
    )


def _shorten(names: Collection[str]) -> str:
    shown = ", ".join(map(shorten, list(names)[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
