"""Rank files of TensorRT-LLM and AMMO: one `kv_cache_scaling_factor` per layer and rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.read_config import CheckpointConfig
from fp8calib.dialects.read_names import RANK_FILE_MARK
from fp8calib.dialects.read_npz import list_arrays, read_number
from fp8calib.dialects.read_values import (
    ONE_FILLS_BOTH,
    Reading,
    check_precision,
    check_scales,
    cut_list,
    join_ranks,
    reading_errors,
    refusal,
)
from fp8calib.errors import shorten
from fp8calib.geometry.model_geometry import ModelGeometry

_RANK = re.compile(r"rank(\d{1,9})(?!\d)", re.ASCII)
_LAYER = re.compile(r"\d+", re.ASCII)


def read_ranks(
    place: Path, files: Sequence[Path], geometry: ModelGeometry, config: CheckpointConfig
) -> Reading:
    """Read the scales of rank files, of which each holds every layer.

    Args:
        place: the folder or file the user named.
        files: the `.safetensors` or `.npz` files that hold scales; a file that is alone may go
            without a rank in its name.
        geometry: the model the scales are for.
        config: what the config beside them says.

    Raises:
        VerificationError: a rank or layer is missing or doubled, or a number is not a scale.
    """
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
        fault = f"{len(ranks)} of {config.tp} rank files are there ({cut_list(sorted(ranks))})"
        raise refusal(place, fault, hint="config.json tells how many there are; copy all of them")
    return Reading(
        dialect="trtllm",
        values=join_ranks(place, geometry, ranks),
        tp=len(ranks),
        fmt=config.fmt,
        files=tuple(files),
        notes=(ONE_FILLS_BOTH,),
    )


def list_tensor_names(path: Path) -> Collection[str]:
    """List the names of the tensors or arrays in a file.

    Raises:
        VerificationError: the file is damaged.
    """
    if path.suffix == ".npz":
        return list_arrays(path)
    with reading_errors():
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
        yield from ((name, read_number(path, name)) for name in names)
        return
    with reading_errors(), TensorFile(path) as file:
        for name in names:
            entry = file.tensors[name]
            if entry.shape not in ((), (1,)) or not file.torch_dtype(name).is_floating_point:
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
            f"{shorten(name)}: which layer it is of cannot be told",
            hint="one part is a number",
        )
    return int(parts[0])
