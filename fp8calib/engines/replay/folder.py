"""A folder as engines find it: read leniently, every fault kept as a fact to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.json_files import load_json
from fp8calib.checkpoint.links import refuse_external_links
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import INDEX_NAME
from fp8calib.dialects.dialect import Spelling
from fp8calib.dialects.kv.config import MODELOPT_CONFIG_NAME
from fp8calib.dialects.kv.overlay import make_quantization_config
from fp8calib.dialects.kv.tensor_names import is_of_draft_layer, is_probability_scale, parse_name
from fp8calib.dialects.metadata import DTYPE_KEY
from fp8calib.engines.replay.verdicts import LoadVerdict, Refusal, Status
from fp8calib.errors import ModelError, VerificationError, shorten
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role

_MAX_SCALE_BYTES = 1 << 20
"""More than any model has heads: what is larger is no scale, and is not read."""

Slot = tuple[int, Role]
"""A layer's k or v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldScale:
    """A tensor with the name of a scale, as it lies in a file."""

    name: str
    file: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    """In fp32; empty where the tensor is far too large for a scale, or of less than a byte each."""

    @property
    def numel(self) -> int:
        """How many numbers it holds; 0 where it is too large to be read."""
        return len(self.values)

    def __str__(self) -> str:
        """Name it with its file, whatever a hostile name is made of."""
        return f"{shorten(self.name)} of {shorten(self.file)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFolder:
    """What lies in a checkpoint folder, as far as its KV scales depend on it."""

    path: Path
    config: Mapping[str, object]
    modelopt: object = None
    """What `hf_quant_config.json` holds; None where there is none."""
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    """By file that can be read, and name: dtype and shape, no data."""
    scales: Mapping[str, Mapping[str, HeldScale]]
    """By file and name."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """The files that cannot be read, each with the reason."""
    has_index: bool = False
    index: object = None
    recorded: Mapping[str, str] = field(default_factory=dict)
    """By file: the FP8 format its header says the scales are for, where it does."""

    @property
    def files(self) -> list[str]:
        """All `*.safetensors` files, readable or not, in order."""
        return sorted({*self.tensors, *self.faults})


def open_folder(path: Path) -> ScaleFolder:
    """Read the headers, the scales and the configs of a folder; no fault in them is refused.

    Raises:
        VerificationError: the folder or its config cannot be read, or a link leads out of it.
    """
    files = _list_files(path)
    config = _load_config(path / CONFIG_NAME)
    tensors: dict[str, Mapping[str, TensorEntry]] = {}
    scales: dict[str, dict[str, HeldScale]] = {}
    faults: dict[str, str] = {}
    recorded: dict[str, str] = {}
    for file in files:
        try:
            with TensorFile(path / file) as opened:
                scales[file] = _read_scales(opened)
                tensors[file] = opened.tensors
                recorded[file] = opened.header.metadata.get(DTYPE_KEY, "")
        except ModelError as error:
            faults[file] = error.message
    has_index = (path / INDEX_NAME).is_file()
    return ScaleFolder(
        path=path,
        config=config,
        modelopt=_load_or_none(path / MODELOPT_CONFIG_NAME),
        tensors=tensors,
        scales=scales,
        faults=faults,
        has_index=has_index,
        index=_load_or_none(path / INDEX_NAME) if has_index else None,
        recorded=recorded,
    )


def place_tensor_file(model: ScaleFolder, path: Path) -> ScaleFolder:
    """Give a model's folder as it would be with a file of scales in it and kv-overlay's config.

    It has no index then, so that engines open every file.
    """
    with TensorFile(path) as opened:
        scales, tensors = _read_scales(opened), opened.tensors
        dtype = opened.header.metadata.get(DTYPE_KEY, "")
    return replace(
        model,
        config={**model.config, "quantization_config": make_quantization_config("tensor")},
        tensors={**model.tensors, path.name: tensors},
        scales={**model.scales, path.name: scales},
        recorded={**model.recorded, path.name: dtype},
        has_index=False,
        index=None,
    )


def _load_config(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        config = load_json(path)
    except (OSError, ValueError) as error:
        hint = "engines stop at a config.json that is not UTF-8 JSON"
        raise VerificationError(f"{path}: not valid JSON: {error}", hint=hint) from error
    if not isinstance(config, dict):
        raise VerificationError(f"{path}: not a JSON object")
    return config


def _load_or_none(path: Path) -> object:
    """Load a JSON file; None where there is none, its fault in words where it cannot be read."""
    if not path.is_file():
        return None
    try:
        return load_json(path)
    except (OSError, ValueError) as error:
        return f"not valid JSON: {error}"


def _list_files(path: Path) -> list[str]:
    try:
        refuse_external_links(path)
        entries = sorted(path.iterdir())
        return [
            entry.name for entry in entries if entry.suffix == ".safetensors" and entry.is_file()
        ]
    except ModelError as error:
        raise VerificationError(error.message, hint=error.hint) from error
    except OSError as error:
        raise VerificationError(f"{path}: cannot be read: {error.strerror}") from error


def _read_scales(file: TensorFile) -> dict[str, HeldScale]:
    named = [
        name for name in file.tensors if parse_name(name) is not None or is_probability_scale(name)
    ]
    return {name: _read_scale(file, name) for name in named}


def _read_scale(file: TensorFile, name: str) -> HeldScale:
    entry = file.tensors[name]
    values: list[float] = []
    if entry.size_bytes <= _MAX_SCALE_BYTES and entry.dtype not in PACKED_BITS:
        read = file.read(name)
        values = (read.real if read.is_complex() else read).to(torch.float32).flatten().tolist()
    return HeldScale(name=name, file=file.path.name, shape=entry.shape, values=tuple(values))


def find_indexed(folder: ScaleFolder, *, error: str) -> list[str]:
    """List the files that the index names, as vLLM, SGLang and transformers do.

    Raises:
        Refusal: the index is none, or names a file that is not beside it.
    """
    index = folder.index
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise Refusal(f"{INDEX_NAME} has no weight_map of names to files", fix="write it anew")
    listed = set(weight_map.values())
    missing = sorted(listed.difference(folder.files))
    if missing:
        shown = ", ".join(map(shorten, missing[:3]))
        why = f"the index names files that are not beside it ({shown}): {error}"
        raise Refusal(why, fix="complete the download, or take them out of the index")
    return sorted(listed)


def require_readable(folder: ScaleFolder, files: Sequence[str]) -> None:
    """Refuse where a file that the engine opens is damaged, or where there is none.

    Raises:
        Refusal: naming the file.
    """
    if not files:
        why = f"there are no safetensors weights to load ({len(folder.files)} files)"
        raise Refusal(why, fix="download the weights, or convert them to safetensors")
    for file in files:
        if file in folder.faults:
            raise Refusal(folder.faults[file], fix="download or write the file again")


class LoadContext:
    """What an engine that opens some of a folder's files sees of the model's scales."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, files: Sequence[str]) -> None:
        self.folder = folder
        self.geometry = geometry
        self.files = tuple(files)
        held = {name: each for file in files for name, each in folder.scales.get(file, {}).items()}
        drafted = [each for name, each in held.items() if _is_of_draft_layer(geometry, name)]
        for each in drafted:
            del held[each.name]
        self.scales = held
        self.problems: list[str] = []
        if drafted:
            self.problems.append(
                f"scales of draft layers ({len(drafted)}, such as {drafted[0]}) are left to the "
                "draft model of speculative decoding"
            )
        self._meant = find_meaning(geometry, self.scales.values())
        self._elsewhere = find_meaning(
            geometry, (held for file in folder.scales.values() for held in file.values())
        )

    def load(self, find_slot: Callable[[str], Slot | None]) -> dict[Slot, HeldScale]:
        """Put every scale where the engine's name rules put it; the last one stays."""
        loaded: dict[Slot, HeldScale] = {}
        for name, held in sorted(self.scales.items()):
            slot = find_slot(name)
            if slot is None:
                continue
            if slot in loaded and loaded[slot].values != held.values:
                self.problems.append(f"{loaded[slot]} and {held} go to one place; one is lost")
            loaded[slot] = held
        return loaded

    def absent(self, slot: Slot, *, value: float | None = 1.0, why: str, fix: str) -> LoadVerdict:
        """Say of a slot that got no scale whether one was there to be had."""
        if slot in self._meant:
            text = f"{self._meant[slot]}: {why}"
            return LoadVerdict(status=Status.DROPPED, value=value, why=text, fix=fix)
        if slot in self._elsewhere:
            status = Status.DEFAULTED if value == 1.0 else Status.DROPPED
            text = f"{self._elsewhere[slot]} is not opened, so the engine finds no scale"
            fix = "list the file in the index, or put the scales into a file that is opened"
            return LoadVerdict(status=status, value=value, why=text, fix=fix)
        status = Status.DEFAULTED if value == 1.0 else Status.MISREAD
        text = f"the checkpoint has no {slot[1]}_scale for this layer"
        fix = "calibrate the layer, or write the scale of the cache it reads"
        return LoadVerdict(status=status, value=value, why=text, fix=fix)


def _is_of_draft_layer(geometry: ModelGeometry, name: str) -> bool:
    parsed = parse_name(name) if geometry.num_draft_layers else None
    return parsed is not None and is_of_draft_layer(geometry, parsed.path)


def find_meaning(geometry: ModelGeometry, scales: Iterable[HeldScale]) -> dict[Slot, HeldScale]:
    """Find which scale of k and v a file means for each layer, in any tool's spelling."""
    owners = {
        spelling: layer.index
        for layer, attention in geometry.attentions()
        for path in (attention.module, attention.checkpoint_module)
        for spelling in (path, f"{path}.attn")
    }
    meant: dict[Slot, HeldScale] = {}
    for held in scales:
        parsed = parse_name(held.name)
        if parsed is None or parsed.path not in owners or parsed.spelling is Spelling.ZERO_POINT:
            continue
        for role in parsed.roles:
            meant.setdefault((owners[parsed.path], role), held)
    return meant
