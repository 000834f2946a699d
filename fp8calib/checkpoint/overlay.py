"""Write a checkpoint folder of a source's weights and a small file of extra tensors.

Servers must find weights and scales through the index, so no file may be called
`model.safetensors`: transformers would read only that file.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import encode_header
from fp8calib.checkpoint.json_files import encode_json
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.output import explained, format_size, require_free_space, write_file_atomic
from fp8calib.checkpoint.tensor_file import TensorFile, save_tensors
from fp8calib.checkpoint.weight_index import INDEX_NAME
from fp8calib.errors import ExportError

CARD_NAME = "README.md"
"""The model card: that of the source is not copied, since it tells of other weights."""
_SINGLE_WEIGHTS_NAME = "model-00001-of-00002.safetensors"
_SINGLE_SCALES_NAME = "model-00002-of-00002.safetensors"
_SHARDED_SCALES_STEM = "model-kv-scales"  # TGI skips names with "arguments", "args", "training"
_TEMPLATES_FOLDER = "additional_chat_templates"
_MODULES_NAME = "modules.json"
_ADAPTER_STEMS = ("adapter_config.", "adapter_model.")  # transformers looks for both
_WEIGHT_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pt", ".pth"}
)
_WEIGHT_ENDINGS = (".safetensors", ".index.json", *_WEIGHT_SUFFIXES)
_COPY_CHUNK_BYTES = 1 << 24
_MAX_SIDE_FILE_BYTES = 100_000_000
_LARGE_SIDE_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
_NO_LINK_ERRORS = frozenset(  # ENOTSUP is EOPNOTSUPP on Linux
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}
)


def name_weights(
    source: Checkpoint, *, without: Collection[str] = ()
) -> tuple[dict[str, TensorFile], str]:
    """Name the files of weights in an overlay of `source`, and the file of extra tensors.

    A file of weights that holds nothing but tensors in `without` is left out.
    """
    if not source.index:
        return {_SINGLE_WEIGHTS_NAME: source.files[0]}, _SINGLE_SCALES_NAME
    weights = {
        file.path.name: file
        for file in source.files
        if not file.tensors or set(file.tensors).difference(without)
    }
    numbered = (f"{_SHARDED_SCALES_STEM}-{number}.safetensors" for number in count(2))
    names = chain([f"{_SHARDED_SCALES_STEM}.safetensors"], numbered)
    return weights, next(name for name in names if name not in weights)


def list_overlay(source: Checkpoint) -> frozenset[str]:
    """List the names of all top-level entries of an overlay of `source`."""
    weights, scales_name = name_weights(source)
    sides = {name.split("/")[0] for name in find_side_files(source)[0]}
    return frozenset({*weights, scales_name, INDEX_NAME, CONFIG_NAME, CARD_NAME, *sides})


def write_overlay(
    source: Checkpoint,
    destination: Path,
    *,
    scales: Mapping[str, torch.Tensor],
    config_updates: Mapping[str, object],
    metadata: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    documents: Mapping[str, object] | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Write a checkpoint of the weights of `source`, extra tensors and a changed config.

    Weights are hard-linked, or copied if the file system cannot link them; other files are copied.
    A failure leaves an incomplete overlay: write it inside an `output_folder`.

    Args:
        source: the checkpoint.
        destination: an empty or new folder.
        scales: the extra tensors.
        config_updates: top-level keys of config.json with their new values.
        metadata: entries for the header of the file of extra tensors.
        without: names of tensors to leave out. A file with no other tensors is left out; any other
            file with some of them is copied without them.
        documents: the new contents of other JSON files of the source, by name.

    Returns:
        The entries of the source that are not copied, and the weight files that are not hard links,
        each with the reason.

    Raises:
        ModelError: the source's config.json is missing or invalid.
        ExportError: a tensor name exists already, or the disk is full.
    """
    present = {*source.tensors, *(name for _, name in source.unlisted)}.difference(without)
    if taken := [name for name in scales if name in present]:
        message = f"{source.folder}: the checkpoint already has a tensor {taken[0]}"
        raise ExportError(message, hint="start from the model without scales")
    config = source.load_config()
    weights, scales_name = name_weights(source, without=without)
    sides, skipped = find_side_files(source)
    with explained(destination):
        destination.mkdir(parents=True, exist_ok=True)
        copied = _add_weights(weights, destination, without)
        copy_side_files(sides, destination)
    described = {"format": "pt", **(metadata or {})}
    save_tensors(destination / scales_name, scales, metadata=described)
    kept = {name: entry for name, entry in source.tensors.items() if name not in without}
    weight_map = dict.fromkeys(sorted(kept), _SINGLE_WEIGHTS_NAME)
    if source.index:
        listed = source.index["weight_map"].items()
        weight_map = {name: file for name, file in listed if name not in without}
    sizes = [entry.size_bytes for entry in kept.values()]
    sizes += [tensor.numel() * tensor.element_size() for tensor in scales.values()]
    index = {
        "metadata": {
            **(source.index["metadata"] if source.index else {}),
            "total_size": sum(sizes),
        },
        "weight_map": weight_map | dict.fromkeys(sorted(scales), scales_name),
    }
    written = {INDEX_NAME: index, CONFIG_NAME: {**config, **config_updates}, **(documents or {})}
    for name, document in written.items():
        write_file_atomic(destination / name, encode_json(document))
    return skipped, copied


def find_side_files(source: Checkpoint) -> tuple[dict[str, Path], dict[str, str]]:
    """Find the files a server needs besides weights, index and config: tokenizer, templates, code.

    Returns:
        The files to copy by their path below the folder, and the other entries with the reason.
    """
    sides: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    weights = {file.path.name for file in source.files}
    listed: object = None
    with suppress(OSError, ValueError, RecursionError):
        listed = json.loads((source.folder / _MODULES_NAME).read_bytes())
    # the folders of modules, such as a dense layer, of sentence-transformers
    modules = {
        module.get("path")
        for module in (listed if isinstance(listed, list) else [])
        if isinstance(module, dict) and isinstance(module.get("path"), str)
    }
    for path in sorted(source.folder.iterdir()):
        if path.name.startswith(".") or path.name in {CONFIG_NAME, CARD_NAME, *weights}:
            continue
        if path.name in {_TEMPLATES_FOLDER, *modules} and path.is_dir():
            files = [f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")]
            # of a module, weights in one format are enough
            if path.name in modules and any(file.suffix == ".safetensors" for file in files):
                files = [file for file in files if file.suffix not in _WEIGHT_SUFFIXES]
            sides |= {f"{path.name}/{file.name}": file for file in sorted(files)}
        elif reason := _skip_reason(path, is_indexed=source.index is not None):
            skipped[path.name] = reason
        elif path.name != INDEX_NAME:
            sides[path.name] = path
    return sides, skipped


def copy_side_files(side_files: Mapping[str, Path], destination: Path) -> None:
    """Copy files to their paths below `destination`; links are followed."""
    require_free_space(destination, sum(path.stat().st_size for path in side_files.values()))
    for name, path in side_files.items():
        target = destination / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _skip_reason(path: Path, *, is_indexed: bool) -> str:
    """Give the reason why an entry is not copied; empty if it is copied or rewritten."""
    if path.name == INDEX_NAME and is_indexed:
        return ""
    if path.name.startswith(_ADAPTER_STEMS) or path.name.endswith(_WEIGHT_ENDINGS):
        return "belongs to other weights"
    if not path.is_file():
        return "a folder, or a broken link"
    is_large = path.stat().st_size > _MAX_SIDE_FILE_BYTES
    is_vocabulary = path.name.startswith(_LARGE_SIDE_FILES) or path.suffix == ".tiktoken"
    return "larger than 100 MB" if is_large and not is_vocabulary else ""


def _add_weights(
    weights: Mapping[str, TensorFile], destination: Path, without: Collection[str]
) -> dict[str, str]:
    """Link weight files, and copy those that cannot be linked; return these with the reason."""
    reasons: dict[str, str] = {}
    unlinked: dict[Path, Path] = {}
    for name, file in weights.items():
        target = destination / name
        if not set(file.tensors).isdisjoint(without):
            _copy_without(file, target, without)
            reasons[name] = f"copied ({format_size(target.stat().st_size)}), because it held scales"
            continue
        blob = file.path.resolve()  # a link to a link would break when the hub's cache is cleaned
        try:
            target.hardlink_to(blob)
        except OSError as error:
            if error.errno not in _NO_LINK_ERRORS:
                raise
            unlinked[target] = blob
            size = format_size(blob.stat().st_size)
            reasons[name] = f"copied ({size}), because it cannot be hard-linked: {error.strerror}"
    require_free_space(destination, sum(blob.stat().st_size for blob in unlinked.values()))
    for target, blob in unlinked.items():
        shutil.copyfile(blob, target)
    return reasons


def _copy_without(source: TensorFile, target: Path, without: Collection[str]) -> None:
    """Copy a safetensors file without some tensors."""
    kept = {name: entry for name, entry in source.tensors.items() if name not in without}
    require_free_space(target.parent, sum(entry.size_bytes for entry in kept.values()))
    metadata = source.metadata
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, entry in kept.items():
        offsets = [place, place := place + entry.size_bytes]
        fields[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    with source, target.open("xb") as new:
        new.write(encode_header(fields))
        for name, entry in kept.items():
            for start in range(0, entry.size_bytes, _COPY_CHUNK_BYTES):
                stop = min(start + _COPY_CHUNK_BYTES, entry.size_bytes)
                new.write(source.read_bytes(name, start, stop).numpy().data)
