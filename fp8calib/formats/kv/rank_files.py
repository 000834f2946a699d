"""Read the rank files of TensorRT-LLM and AMMO: one scale per layer and rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.errors import cut_list, refusal, shorten
from fp8calib.formats.dialect import ParsedScales, ScaleFiles
from fp8calib.formats.kv.config import read_config
from fp8calib.formats.kv.parse_names import RANK_FILE_MARK
from fp8calib.formats.kv.validate import check_precision, check_scales, join_ranks
from fp8calib.model.geometry import ModelGeometry

if TYPE_CHECKING:  # scales are recognised without torch
    import torch

_RANK = re.compile(r"rank(\d{1,9})(?!\d)", re.ASCII)
_LAYER = re.compile(r"\d+", re.ASCII)


def read_ranks(found: ScaleFiles, files: Sequence[Path], geometry: ModelGeometry) -> ParsedScales:
    """Read the scales of rank files; each file holds every layer.

    `found` is the place that the user named, and `files` are its files with scales. A single file
    needs no rank in its name.
    """
    place, (fmt, tp) = found.place, read_config(found.folder, geometry)
    ranks: dict[int, dict[int, torch.Tensor]] = {}
    for path in files:
        rank = _find_rank(path, is_alone=len(files) == 1)
        if rank in ranks:
            names = cut_list([file.name for file in files])
            raise refusal(place, f"two files of rank {rank} ({names})", hint="name one set")
        ranks[rank] = _read_layers(path)
    if tp is not None and len(ranks) < tp:
        fault = f"only {len(ranks)} of {tp} rank files exist ({cut_list(sorted(ranks))})"
        hint = "config.json states the number of ranks; copy all rank files"
        raise refusal(place, fault, hint=hint)
    return join_ranks(place, geometry, ranks, files=files, fmt=fmt)


def list_tensor_names(path: Path) -> Collection[str]:
    """List the names of the tensors or arrays in a file."""
    return list_npz_arrays(path) if path.suffix == ".npz" else TensorFile(path).tensors


def _find_rank(path: Path, *, is_alone: bool) -> int:
    found = set(_RANK.findall(path.name))
    if not found and is_alone:
        return 0
    if len(found) != 1:
        fault = "no rank" if not found else f"several ranks ({cut_list(sorted(found))})"
        hint = "rank files are called `...rank<N>...`"
        raise refusal(path, f"{fault} in the file's name", hint=hint)
    return int(found.pop())


def _read_layers(path: Path) -> dict[int, torch.Tensor]:
    import torch  # noqa: PLC0415 -- slow

    layers: dict[int, torch.Tensor] = {}
    for name, number in _read_values(path):
        parts = [part for part in name.split(".") if _LAYER.fullmatch(part)]
        if len(parts) != 1 or len(parts[0]) > 9:
            fault = f"{shorten(name)}: the name does not contain one layer number"
            raise refusal(path, fault, hint="exactly one part of the name must be a number")
        index = int(parts[0])
        if index in layers:
            raise refusal(path, f"{shorten(name)}: a second scale for layer {index}")
        layers[index] = torch.tensor(number)
        check_scales(path, name, layers[index])
    return layers


def _read_values(path: Path) -> Iterator[tuple[str, float]]:
    names = [name for name in list_tensor_names(path) if RANK_FILE_MARK in name]
    if path.suffix == ".npz":
        yield from ((name, read_npz_number(path, name)) for name in names)
        return
    with TensorFile(path) as file:
        for name in names:
            entry = file.tensors[name]
            if entry.shape not in ((), (1,)) or not file.dtype(name).is_floating_point:
                fault = f"{shorten(name)} is {entry.dtype} of shape {list(entry.shape)}"
                raise refusal(path, fault, hint="a scale is one float")
            number = float(file.read_floats(name).item())
            check_precision(path, shorten(name), number, stored=entry.dtype)
            yield name, number


def list_npz_arrays(path: Path) -> list[str]:
    """List the names of the arrays in an archive."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return list(archive.files)
    except Exception as error:  # zipfile and numpy raise ten kinds for damaged archives
        raise refusal(path, f"not a readable .npz archive: {_quote_error(error)}") from error


def read_npz_number(path: Path, name: str) -> float:
    """Read the one number of an array, rounded to fp32."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            array = archive[name]
    except Exception as error:  # zipfile and numpy raise ten kinds for damaged data
        fault = f"{shorten(name)}: cannot be read: {_quote_error(error)}"
        raise refusal(path, fault, hint="copy the file again") from error
    if array.size != 1 or array.dtype.kind != "f":
        fault = f"{shorten(name)} is {array.dtype!s:.60} of shape {list(array.shape)}"
        raise refusal(path, fault, hint="a scale is one float")
    with np.errstate(over="ignore"):
        number = float(array.astype(np.float32).item())
    stored = "F16" if array.dtype == np.float16 else ""
    check_precision(path, shorten(name), number, stored=stored)
    return number


def _quote_error(error: Exception) -> str:
    """Quote an error in ASCII; the message of a damaged archive can contain its bytes."""
    return f"{type(error).__name__}, {error!s:.160}".encode("ascii", "backslashreplace").decode()
