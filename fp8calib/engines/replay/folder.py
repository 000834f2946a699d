"""Read a checkpoint folder as leniently as engines do: faults are recorded, not raised."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.json_files import load_json
from fp8calib.checkpoint.locations import refuse_external_link
from fp8calib.checkpoint.model_config import CONFIG_NAME, MODELOPT_CONFIG_NAME, find_dtype
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import INDEX_NAME, list_pickled
from fp8calib.errors import ModelError, cut_list, shorten
from fp8calib.formats.kv.parse_names import PROBABILITY_SCALES, ScaleName, parse_name
from fp8calib.formats.metadata import DTYPE_KEY
from fp8calib.model.geometry import ModelGeometry

_MAX_SCALE_BYTES = 1 << 20
"""No model has so many heads: a larger tensor is not a scale and is not read."""

_LIKE_KV_SCALE = re.compile(
    r"(?:^|\.)(?:k|v|kv|key|value)_?(?:cache)?_?scal(?:e|es|ing_factor)$"
    r"|att(?:n|ention)\.[^.]*[kv][^.]*scale[^.]*$",
    re.IGNORECASE,
)
_KV_KEYS = (
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "kv_cache_torch_dtype",
    "kv_cache_dtype",
    "kv_cache_group",
    "kv_cache_quant_config",
)
"""Keys of compressed-tensors and AutoFP8, ModelOpt, TGI's pull request, and Quark."""
_NO_KV: tuple[object, ...] = (None, "", "auto", [], {})
"""Values of these keys that leave the cache in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScale:
    """A tensor with the name of a scale, as a file stores it."""

    name: str
    file: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    """In fp32; empty where the tensor is too large for a scale, or has elements under 8 bits."""
    parsed: ScaleName | None
    """What its name says; None for a scale of attention probabilities."""

    def __str__(self) -> str:
        """Name the tensor and its file, escaped and shortened."""
        return f"{shorten(self.name)} of {shorten(self.file)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFolder:
    """The parts of a checkpoint folder that decide what engines do with its scales."""

    path: Path
    config: Mapping[str, object]
    modelopt: object = None
    """What `hf_quant_config.json` holds, or why it cannot be read; None if there is none."""
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    """By readable file, then by name: dtype and shape."""
    scales: Mapping[str, Mapping[str, FoundScale]]
    """By file, then by name."""
    files: Sequence[str] = ()
    """All `*.safetensors` files, readable or not, in the order in which they are opened."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """The files that cannot be read, with the reason."""
    has_index: bool = False
    index: object = None
    """What the index holds, or why it cannot be read; None if there is none."""
    indexed: Mapping[str, str] | None = None
    """The file of each tensor according to the index, by its name if it is in this folder; None if
    there is no index, or it has no `weight_map`."""
    unread: str = ""
    """Why the weights are not read, although engines may read them; empty if they are."""
    recorded: Mapping[str, str] = field(default_factory=dict)
    """By file: the FP8 format that its header names for the scales; empty if it names none."""
    preferred: str = ""
    """What the engine opens instead of all other files, in words; empty if it opens all."""

    @property
    def asks_for_kv(self) -> bool:
        """Whether a config asks for an FP8 KV cache, or a tensor has the name of a KV scale.

        Names that no engine knows (`K_scale`, `kscale`) count too.
        """
        names = chain(self.indexed or {}, *self.tensors.values())
        if any(self.scales.values()) or any(map(_LIKE_KV_SCALE.search, names)):
            return True
        # Engines read hf_quant_config.json only where config.json has no quantization_config.
        has_own = isinstance(self.config.get("quantization_config"), dict)
        return _asks_for_kv(self.config) or (not has_own and _asks_for_kv(self.modelopt))


def _asks_for_kv(config: object) -> bool:
    """Search a config, and all that is nested in it, for an entry that asks for an FP8 KV cache."""
    if not isinstance(config, dict):
        return False
    asked = (config.get(key) for key in _KV_KEYS)
    return any(value not in _NO_KV for value in asked) or any(map(_asks_for_kv, config.values()))


def _list_indexed(path: Path, index: object) -> Mapping[str, str] | None:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        return None
    named = {name: file for name, file in weight_map.items() if isinstance(file, str)}
    folder = os.path.normpath(path)
    split = {file: os.path.split(os.path.normpath(path / file)) for file in named.values()}
    inside = {file: name for file, (parent, name) in split.items() if parent == folder}
    return {name: inside.get(file, file) for name, file in named.items()}


def open_folder(path: Path) -> ScaleFolder:
    """Read the headers, the scales and the configs of a folder; faults in files are recorded.

    Raises:
        ModelError: the folder or its config cannot be read, or the config is a link out of it.
    """
    files, unread = _list_files(path)
    config: object = {}
    if (path / CONFIG_NAME).is_file():
        try:
            config = load_json(path / CONFIG_NAME)
        except (OSError, ValueError) as error:
            hint = "no engine starts with a config.json that is not UTF-8 JSON"
            raise ModelError(f"{path / CONFIG_NAME}: not valid JSON: {error}", hint=hint) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path / CONFIG_NAME}: not a JSON object")
    tensors: dict[str, Mapping[str, TensorEntry]] = {}
    scales: dict[str, dict[str, FoundScale]] = {}
    faults: dict[str, str] = {}
    recorded: dict[str, str] = {}
    for file in files:
        if not (path / file).is_file():
            faults[file] = f"{path / file}: a link to nothing, or a folder"
            continue
        try:
            with TensorFile(path / file) as opened:
                scales[file] = _read_scales(opened)
                tensors[file] = opened.tensors
                recorded[file] = opened.metadata.get(DTYPE_KEY, "")
        except ModelError as error:
            faults[file] = error.message
    index = _load_leniently(path / INDEX_NAME)
    return ScaleFolder(
        path=path,
        config=config,
        files=files,
        modelopt=_load_leniently(path / MODELOPT_CONFIG_NAME),
        tensors=tensors,
        scales=scales,
        faults=faults,
        has_index=(path / INDEX_NAME).is_file(),
        index=index,
        indexed=_list_indexed(path, index),
        unread=unread,
        recorded=recorded,
    )


def _load_leniently(path: Path) -> object:
    """Load a JSON file; None if it does not exist, a message if it cannot be read."""
    try:
        return load_json(path) if path.is_file() else None
    except (OSError, ValueError) as error:
        return f"not valid JSON: {error}"


def _list_files(path: Path) -> tuple[list[str], str]:
    """List the safetensors files of a folder, and say which weights are not read.

    A link out of the folder is not followed: the author of a checkpoint must not choose which other
    files of the machine are read.
    """
    try:
        entries = sorted(path.iterdir())
        weights = [entry for entry in entries if entry.suffix == ".safetensors"]
        for entry in entries:
            if entry.suffix == ".json":
                refuse_external_link(entry)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        for entry in weights:
            refuse_external_link(entry)
    except ModelError as error:
        return [], f"{error.message}, which is not followed"
    pickled = [] if weights else list_pickled([entry.name for entry in entries])
    unread = f"the weights are pickled ({cut_list(pickled, 3)}), which are not read"
    return [entry.name for entry in weights], unread if pickled else ""


def _read_scales(file: TensorFile) -> dict[str, FoundScale]:
    parsed = {name: parse_name(name) for name in file.tensors}
    named = [
        name
        for name, each in parsed.items()
        if each is not None or name.endswith(PROBABILITY_SCALES)
    ]
    read = [
        name
        for name in named
        if file.tensors[name].size_bytes <= _MAX_SCALE_BYTES
        and file.tensors[name].dtype not in PACKED_BITS
    ]
    file.fetch(read)
    values = {name: tuple(file.read_floats(name).flatten().tolist()) for name in read}
    return {
        name: FoundScale(
            name=name,
            file=file.path.name,
            shape=file.tensors[name].shape,
            values=values.get(name, ()),
            parsed=parsed[name],
        )
        for name in named
    }


def make_stand_in_geometry(model: ScaleFolder) -> ModelGeometry:
    """Make the shape of a model that is not understood: it has no layers."""
    named = model.config.get("architectures")
    return ModelGeometry(
        architecture=str(named[0]) if isinstance(named, list) and named else "",
        model_type=str(model.config.get("model_type")),
        checkpoint_dtype=find_dtype(model.config),
        layers=(),
    )
