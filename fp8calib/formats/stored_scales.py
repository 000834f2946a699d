"""The scales of a file or a checkpoint of any tool, exactly as stored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import PACKED_BITS
from fp8calib.checkpoint.json_files import is_result, load_json_object, parse_unique_keys
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import GGUF_HINT
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.kv.read_ranks import read_npz
from fp8calib.formats.read import refuse_result
from fp8calib.formats.registry import list_json_keys, list_scale_suffixes

StoredScale = tuple[str, list[float] | str]
"""A scale's name, and its values or a description of them."""
_RANK_FILE_SUFFIXES = (".npz", ".safetensors")
_INDEX = re.compile(r"[0-9]{1,9}")
_MOST_VALUES = 1 << 16
"""A larger tensor is only described: a list of its values takes 30 times the file's size."""


def read_stored_scales(path: Path) -> dict[str, tuple[float | str, ...] | str]:
    """Read the scales of a file or a checkpoint folder, those of layer 2 before layer 10.

    NaN and infinities, which JSON does not have, are text. A large tensor is only described.

    Raises:
        ModelError: the file is of an unsupported kind, holds no scales, or cannot be read.
    """
    found = dict(sorted(_read(path), key=_natural_key))
    if not found:
        none = ModelError(f"{path} holds no scales", hint="pass statistics or a file of scales")
        raise refuse_result(path) if is_result(path) else none
    return {
        name: x if isinstance(x, str) else tuple(y if math.isfinite(y) else str(y) for y in x)
        for name, x in found.items()
    }


def _natural_key(scale: StoredScale) -> list[tuple[int, str]]:
    parts = scale[0].split(".")
    return [(int(part), "") if _INDEX.fullmatch(part) else (-1, part) for part in parts]


def _read(path: Path) -> Iterator[StoredScale]:
    # the files of TensorRT-LLM's and AMMO's ranks; a checkpoint has none
    ranks = sorted(path.glob("*rank[0-9]*")) if path.is_dir() else []
    ranks = [each for each in ranks if each.suffix in _RANK_FILE_SUFFIXES and each.is_file()]
    if ranks:
        for each in ranks:
            yield from ((f"{each.name}.{name}", values) for name, values in _read(each))
    elif path.is_dir():
        with Checkpoint.open(path) as checkpoint:
            yield from _read_tensors(checkpoint)
    elif path.suffix == ".safetensors":
        with TensorFile(path) as file:
            yield from _read_tensors(file)
    elif path.suffix == ".json":
        yield from _read_json(path)
    elif path.suffix == ".npz":
        suffixes = list_scale_suffixes()
        for name, array in read_npz(path, lambda name: name.endswith(suffixes)).items():
            if array is not None and array.dtype.kind == "f" and array.size <= _MOST_VALUES:
                yield name, array.astype(np.float32).flatten().tolist()
            elif array is not None:
                yield name, f"{array.dtype} of shape {list(array.shape)}"
    else:
        hint = GGUF_HINT if path.suffix == ".gguf" else "name statistics or scales"
        fault = "neither a .safetensors, .npz or .json file nor a checkpoint folder"
        raise ModelError(f"{path}: {fault}", hint=hint)


def _read_tensors(file: TensorFile | Checkpoint) -> Iterator[StoredScale]:
    for name, entry in file.tensors.items():
        if not name.endswith(list_scale_suffixes()):
            continue
        if math.prod(entry.shape) > _MOST_VALUES or entry.dtype in PACKED_BITS:
            yield name, f"{entry.dtype} of shape {list(entry.shape)}"
        else:
            yield name, file.read_floats(name, of_scale=True).flatten().tolist()


def _read_json(path: Path) -> Iterator[StoredScale]:
    """Read all numbers of a document; without recursion, as it may be deeply nested."""
    document = load_json_object(path, parse=parse_unique_keys)
    if not any(keys[0] in document for keys in list_json_keys()):
        return
    waiting: list[tuple[str, object]] = [("", document)]
    while waiting:
        name, value = waiting.pop()
        start = f"{name}." if name else ""
        if isinstance(value, dict):
            # of a file with `scales_shape`, only the tables hold scales
            has_tables = "scales_shape" in value
            waiting += (
                (f"{start}{key}", inner)
                for key, inner in value.items()
                if not has_tables or key == "scales" or isinstance(inner, dict)
            )
        elif isinstance(value, list):
            waiting += ((f"{start}{index}", inner) for index, inner in enumerate(value))
        elif isinstance(value, float) or (type(value) is int and abs(value) < 1 << 64):
            yield name, [float(value)]
        elif type(value) is int:
            yield name, shorten(str(value))
