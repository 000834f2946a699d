"""Find the weight files of a folder and read their index; explain it if there are none."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from fp8calib.checkpoint.json_files import load_json_object, parse_unique_keys
from fp8calib.errors import ModelError, cut_list

SINGLE_FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_ADAPTER_NAME = "adapter_model.safetensors"
GGUF_HINT = "use the safetensors model that the GGUF was made from"
_SHARD_NAME = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors", re.DOTALL)
_SERIES = re.compile(r"-\d+-of-\d+\.safetensors$")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_NO_PICKLED_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt"})


WeightIndex = Mapping[Literal["weight_map", "metadata"], Mapping[str, Any]]
"""The contents of `model.safetensors.index.json`: the file of each tensor, and metadata."""


def find_weights(folder: Path) -> tuple[tuple[str, ...], WeightIndex | None]:
    """List the weight files of a folder, sorted, and give the index if there are several.

    As in transformers, `model.safetensors` takes precedence over an index. If neither exists, a
    single file is accepted, as by vLLM, unless its name marks it as a shard or an adapter.

    Raises:
        ModelError: the folder holds no safetensors weights, or not all of them.
    """
    names = _list_names(folder)
    if SINGLE_FILE_NAME in names:
        return (SINGLE_FILE_NAME,), None
    if INDEX_NAME in names:
        index = read_index(folder / INDEX_NAME)
        files = sorted(set(index["weight_map"].values()))
        if missing := [name for name in files if not (folder / name).is_file()]:
            message = f"{folder / INDEX_NAME}: {len(missing)} of {len(files)} shards are missing: "
            raise ModelError(message + cut_list(missing, 3), hint="the download is incomplete")
        return tuple(files), index
    weights = [name for name in names if name.endswith(".safetensors") and name != _ADAPTER_NAME]
    if not weights:
        raise _explain_no_weights(folder, names)
    is_shard = _SERIES.search(weights[0]) and not weights[0].endswith("-00001-of-00001.safetensors")
    if len(weights) > 1 or is_shard:
        message = f"{folder}: {INDEX_NAME} is missing, but there is {cut_list(weights, 3)}"
        raise ModelError(message, hint="download the index, which maps tensors to files")
    return (weights[0],), None


def read_index(path: Path) -> WeightIndex:
    """Read and check an index, except that its files exist."""
    document = load_json_object(path, parse=parse_unique_keys)
    weight_map, metadata = document.get("weight_map"), document.get("metadata")
    names: Mapping[str, object] = weight_map if isinstance(weight_map, dict) else {}
    # A plain name: shards are in the folder itself, never outside it.
    shards = {n: f for n, f in names.items() if isinstance(f, str) and _SHARD_NAME.fullmatch(f)}
    wrong = next((name for name in names if name not in shards), None)
    if not names or wrong is not None:
        fault = "there is no weight_map"
        if wrong is not None:
            fault = f"the tensor {wrong!a:.200} is mapped to {names[wrong]!a:.200}"
        hint = "weight_map gives for each tensor a *.safetensors file in the same folder"
        raise ModelError(f"{path}: {fault}", hint=hint)
    return {"weight_map": shards, "metadata": metadata if isinstance(metadata, dict) else {}}


def lacks_weights(folder: Path) -> bool:
    """Tell whether a folder holds no weights in any form, nor an index of some."""
    names = _list_names(folder)
    weights = (name for name in names if name.endswith((".safetensors", ".gguf")))
    return INDEX_NAME not in names and not list_pickled(names) and not any(weights)


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        hint = "name a folder that holds a model, or the hub id of one"
        message = f"{folder} is no model folder: {error.strerror}"
        raise ModelError(message, hint=GGUF_HINT if folder.suffix == ".gguf" else hint) from error


def list_pickled(names: Collection[str]) -> list[str]:
    """List the names of files that hold pickled weights."""
    suffixes, others = _PICKLE_SUFFIXES, _NO_PICKLED_WEIGHTS
    return [name for name in names if Path(name).suffix in suffixes and name not in others]


def _explain_no_weights(folder: Path, names: Collection[str]) -> ModelError:
    what = "there are no *.safetensors weights"
    hint = f"expected {SINGLE_FILE_NAME} or {INDEX_NAME} with its shards"
    if _ADAPTER_NAME in names:
        what = f"{_ADAPTER_NAME} is an adapter, not a model"
        hint = "merge it into its base model and save the result"
    elif pickled := list_pickled(names):
        what = f"the weights are pickled ({cut_list(pickled, 3)}), which is not supported"
        hint = (
            'convert them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained('converted')\""
            ", then copy the tokenizer files"
        )
    elif packed := [name for name in names if name.endswith(".gguf")]:
        what = f"the weights are GGUF ({cut_list(packed, 3)}), which is not supported"
        hint = GGUF_HINT
    return ModelError(f"{folder}: {what}", hint=hint)
