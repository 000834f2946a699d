"""Read the rank files of TensorRT-LLM and AMMO: one scale per layer and rank."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.errors import cut_list, shorten
from fp8calib.formats.dialect import ParsedScales, ScaleFiles
from fp8calib.formats.kv.config import read_config
from fp8calib.formats.kv.parse_names import RANK_FILE_MARK
from fp8calib.formats.kv.validate import check_precision, check_scales, join_ranks
from fp8calib.formats.refusals import refusal
from fp8calib.model.shapes import ModelGeometry

_RANK = re.compile(r"rank(\d{1,9})(?!\d)", re.ASCII)
_LAYER = re.compile(r"\d+", re.ASCII)


def read_ranks(found: ScaleFiles, files: Sequence[Path], geometry: ModelGeometry) -> ParsedScales:
    """Read the scales of rank files; each file holds every layer.

    `found` is the place that the user named, and `files` are its files with scales. A single file
    needs no rank in its name.

    Raises:
        ModelError: a rank or layer is missing or occurs twice, or a number is not a scale.
    """
    place, config = found.place, read_config(found.folder, geometry)
    ranks: dict[int, dict[int, torch.Tensor]] = {}
    for path in files:
        rank = _find_rank(path, is_alone=len(files) == 1)
        if rank in ranks:
            names = [file.name for file in files]
            raise refusal(
                place, f"two files of rank {rank} ({cut_list(names)})", hint="name one set"
            )
        ranks[rank] = _read_layers(path)
    if config.tp is not None and len(ranks) < config.tp:
        fault = f"only {len(ranks)} of {config.tp} rank files exist ({cut_list(sorted(ranks))})"
        raise refusal(
            place, fault, hint="config.json states the number of ranks; copy all rank files"
        )
    return join_ranks(place, geometry, ranks, files=files, fmt=config.fmt)


def list_tensor_names(path: Path) -> Collection[str]:
    """List the names of the tensors or arrays in a file.

    Raises:
        ModelError: the file is damaged.
    """
    if path.suffix == ".npz":
        return list_npz_arrays(path)
    return TensorFile(path).tensors


def _find_rank(path: Path, *, is_alone: bool) -> int:
    found = set(_RANK.findall(path.name))
    if not found and is_alone:
        return 0
    if len(found) != 1:
        fault = "no rank" if not found else f"several ranks ({cut_list(sorted(found))})"
        raise refusal(
            path, f"{fault} in the file's name", hint="rank files are called `...rank<N>...`"
        )
    return int(found.pop())


def _read_layers(path: Path) -> dict[int, torch.Tensor]:
    layers: dict[int, torch.Tensor] = {}
    for name, value in _read_values(path):
        index = _find_layer(path, name)
        if index in layers:
            raise refusal(path, f"{shorten(name)}: a second scale for layer {index}")
        check_scales(path, name, value)
        layers[index] = value
    return layers


def _read_values(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
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
            value = file.read(name).to(torch.float32).reshape(())
            check_precision(path, shorten(name), value, stored=entry.dtype)
            yield name, value


def _find_layer(path: Path, name: str) -> int:
    parts = [part for part in name.split(".") if _LAYER.fullmatch(part)]
    if len(parts) != 1 or len(parts[0]) > 9:
        raise refusal(
            path,
            f"{shorten(name)}: the name does not contain one layer number",
            hint="exactly one part of the name must be a number",
        )
    return int(parts[0])


_MAX_MEMBER_BYTES = 1 << 16
"""An array of one number takes about 130 bytes, most of them header."""
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The other decompressors have no limit: a few thousand bytes can become gigabytes."""
_READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def list_npz_arrays(path: Path) -> list[str]:
    """List the names of the arrays in an archive.

    Raises:
        ModelError: the file is not a .npz archive, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # zipfile raises ten kinds for damaged archives
        raise refusal(path, f"not a readable .npz archive: {_quote_error(error)}") from error
    return [name.removesuffix(".npy") for name in names]


def read_npz_number(path: Path, name: str) -> torch.Tensor:
    """Read the one number of an array as fp32 0-dim.

    Raises:
        ModelError: the array is not a single float, or the archive is damaged.
    """
    try:
        shape, dtype, raw = _read_member(path, name)
    except Exception as error:  # zipfile and numpy raise ten kinds for damaged data
        fault = f"{shorten(name)}: cannot be read: {_quote_error(error)}"
        raise refusal(path, fault, hint="copy the file again") from error
    if dtype.hasobject:
        raise refusal(
            path,
            f"{shorten(name)}: it is pickled, which is not read",
            hint="save it as a float array",
        )
    if math.prod(shape) != 1 or dtype.kind != "f":
        raise refusal(
            path,
            f"{shorten(name)} is {dtype!s:.60} of shape {list(shape)}",
            hint="a scale is one float",
        )
    if len(raw) != dtype.itemsize:
        raise refusal(path, f"{shorten(name)}: truncated", hint="copy the file again")
    value = torch.tensor(float(np.frombuffer(raw, dtype=dtype)[0]), dtype=torch.float32)
    check_precision(path, shorten(name), value, stored="F16" if dtype == np.float16 else "")
    return value


def _read_member(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype[np.generic], bytes]:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type not in _COMPRESSIONS:
            raise ValueError("compressed by a method that numpy does not use")
        if info.file_size > _MAX_MEMBER_BYTES:
            raise ValueError(f"{info.file_size} bytes are too many for one number")
        with archive.open(info) as member:
            version = npy.read_magic(member)
            if version not in _READ_HEADER:
                raise ValueError(f"version {version} of the .npy format")
            shape, _, dtype = _READ_HEADER[version](member)
            return shape, dtype, member.read(min(dtype.itemsize, _MAX_MEMBER_BYTES))


def _quote_error(error: Exception) -> str:
    """Quote an error in ASCII; the message of a damaged archive can contain its bytes."""
    return f"{type(error).__name__}, {error!s:.160}".encode("ascii", "backslashreplace").decode()
