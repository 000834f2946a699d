"""The files of a checkpoint that an engine opens: their tensors, and where the index differs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

import torch

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.weights.linears import PLAIN_DTYPES
from fp8calib.errors import shorten
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.shapes import ModelGeometry

Located = Mapping[str, tuple[str, TensorEntry]]
"""The file and the entry of each tensor, by its name."""
_PREFERRED_BY_VLLM = "consolidated"


def list_opened_files(folder: ScaleFolder, *, prefers_single: bool = False) -> tuple[str, ...]:
    """List the files that an engine opens, readable or not, in order.

    Some folders contain the same weights again, under other names, in files that the index does not
    name. transformers prefers `model.safetensors` to those that it names.
    """
    weight_map = folder.indexed
    named = set(folder.files) if weight_map is None else set(weight_map.values())
    if prefers_single and SINGLE_FILE_NAME in folder.files:
        named = {SINGLE_FILE_NAME}
    return tuple(file for file in folder.files if file in named)


def locate_tensors(folder: ScaleFolder, *, prefers_single: bool = False) -> Located:
    """List the tensors of those files that are readable."""
    return {
        name: (file, entry)
        for file in list_opened_files(folder, prefers_single=prefers_single)
        for name, entry in folder.tensors.get(file, {}).items()
    }


def list_index_problems(folder: ScaleFolder, geometry: ModelGeometry) -> list[str]:
    """Say where the index and the files differ: tensors, and files with weights of the model."""
    weight_map = folder.indexed
    if weight_map is None:
        return []
    named = set(weight_map.values())
    lost = [
        name
        for name, file in weight_map.items()
        if file in folder.tensors and name not in folder.tensors[file]
    ]
    unlisted = [
        name
        for file in sorted(named.intersection(folder.tensors))
        for name in folder.tensors[file]
        if name not in weight_map
    ]
    problems = []
    if lost:
        what = f"{shorten(lost[0])} ({len(lost)} in all)"
        problems.append(f"{INDEX_NAME} names {what}, which its file does not contain")
    if unlisted:
        what = f"{shorten(unlisted[0])} ({len(unlisted)} in all)"
        problems.append(f"{INDEX_NAME} does not name {what}; engines load whole files")
    for file, held in folder.tensors.items():
        if file not in named and (name := next(filter(geometry.parameters.get, held), None)):
            openers = "TGI and vLLM open" if file.startswith(_PREFERRED_BY_VLLM) else "TGI opens"
            problems.append(
                f"{INDEX_NAME} does not name {shorten(file)}, which contains {shorten(name)}: "
                f"{openers} it, other engines do not"
            )
    return problems


def describe_paths(folder: ScaleFolder) -> str:
    """Say where the index names files by paths, which engines compare as texts; else empty."""
    weight_map = folder.index.get("weight_map") if isinstance(folder.index, dict) else None
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    path = next((each for each in named if isinstance(each, str) and os.sep in each), "")
    return f"{INDEX_NAME} names {shorten(path)}, a path: an engine may not find it" if path else ""


def find_wrong_values(
    folder: ScaleFolder, geometry: ModelGeometry, *, prefers_single: bool = False
) -> str:
    """Say which tensor a later file replaces, or which norm or bias holds NaN or infinity.

    Engines give no error for either. Empty where there is none.
    """
    if not folder.is_on_disk:
        return ""
    files = list_opened_files(folder, prefers_single=prefers_single)
    # vLLM 0.32.0 and transformers 5.23 keep the last one (run). KV scales are judged elsewhere.
    indexed = folder.indexed or {}
    for first, last in combinations([file for file in files if file in folder.tensors], 2):
        for name in filter(folder.tensors[last].__contains__, folder.tensors[first]):
            is_meant = indexed.get(name) == last or parse_name(name) is not None
            if not is_meant and not _is_equal(folder, name, first, last):
                where = f"{shorten(first)} and, with other values, in {shorten(last)}"
                return f"{shorten(name)} is in {where}: the later file wins"
    vectors: dict[str, list[str]] = defaultdict(list)
    for name, (file, entry) in locate_tensors(folder, prefers_single=prefers_single).items():
        if len(entry.shape) == 1 and entry.dtype in PLAIN_DTYPES and name in geometry.parameters:
            vectors[file].append(name)
    for file, names in vectors.items():
        with TensorFile(folder.path / file) as held:
            held.fetch(names)
            for name in names:
                if not bool(held.read(name).isfinite().all()):
                    return f"{shorten(name)} holds NaN or infinity"
    return ""


def _is_equal(folder: ScaleFolder, name: str, *files: str) -> bool:
    entries = [folder.tensors[file][name] for file in files]
    if len({(each.dtype, each.shape) for each in entries}) > 1:
        return False
    read = []
    for file in files:
        with TensorFile(folder.path / file) as opened:
            read.append(opened.read_bytes(name, 0, entries[0].size_bytes))
    return torch.equal(*read)
