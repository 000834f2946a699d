"""Read the scales of ranks: JSON (vLLM's schema, the RFC), files of TensorRT-LLM and AMMO."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.errors import cut_list, name_ranges, refusal, shorten
from fp8calib.formats.dialect import ParsedScales, ScaleFiles
from fp8calib.formats.kv.config import read_config
from fp8calib.formats.kv.parse_names import RANK_FILE_MARK
from fp8calib.formats.kv.validate import (
    ONE_FILLS_BOTH,
    OTHER_MODEL,
    check_model_type,
    check_scales,
    missing_layers,
)
from fp8calib.formats.metadata import find_format, parse_origin
from fp8calib.model.geometry import KV_ROLES, ModelGeometry
from fp8calib.numerics.formats import Fp8Format

if TYPE_CHECKING:  # scales are recognised without torch
    import torch

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_EXPECTED = 'expected {"model_type": ..., "kv_cache": {"dtype": ..., "scaling_factor": {...}}}'
_RANK = re.compile(r"rank(\d{1,9})(?!\d)", re.ASCII)
_LAYER = re.compile(r"\d+", re.ASCII)
_BEYOND = 2.0**128
"""Infinite in fp32."""


def read_json(files: ScaleFiles, geometry: ModelGeometry, *, rank_prefix: str) -> ParsedScales:
    """Read the KV scales of a JSON file; its sections about weights are ignored.

    `rank_prefix` precedes the number in the key of a rank.
    """
    if len(files.documents) > 1:
        names = cut_list([path.name for path in files.documents])
        fault = f"several files hold KV scales: {names}"
        raise refusal(files.place, fault, hint="name one of them")
    ((path, document),) = files.documents.items()
    kv_cache: Any = document.get("kv_cache")
    factors = kv_cache.get("scaling_factor") if isinstance(kv_cache, dict) else None
    if not isinstance(factors, dict) or not factors:
        fault = "there is no `kv_cache` object with a `scaling_factor` object"
        raise refusal(path, fault, hint=_EXPECTED)
    is_named = "dtype" in kv_cache
    fmt = find_format(path, "kv_cache.dtype", kv_cache["dtype"]) if is_named else None
    starting = [key for key in factors if key.startswith(rank_prefix)]
    numbers = {key: key.removeprefix(rank_prefix) for key in starting}
    if len(numbers) < len(factors) or not all(map(_INDEX.fullmatch, numbers.values())):
        keys = cut_list([ascii(key)[:40] for key in factors])
        hint = 'ranks are "0", "1", ... (vllm-json) or "rank0", "rank1", ... (rfc), never both'
        raise refusal(path, f"the keys of kv_cache.scaling_factor are not ranks: {keys}", hint=hint)
    check_model_type(path, document.get("model_type"), geometry)
    ranks: dict[int, dict[int, torch.Tensor]] = {}
    for key, layers in factors.items():
        if not isinstance(layers, dict) or not all(map(_INDEX.fullmatch, layers)):
            fault = f"kv_cache.scaling_factor.{key} is not an object with a number for each layer"
            raise refusal(path, fault, hint='layers are "0", "1", ...')
        rank = int(numbers[key])
        ranks[rank] = {
            int(layer): _read_number(path, f"layer {layer} of rank {rank}", value)
            for layer, value in layers.items()
        }
    origin = parse_origin(path, document)
    return _join_ranks(path, geometry, ranks, files=[path], fmt=fmt, origin=origin)


def _read_number(path: Path, where: str, value: object) -> torch.Tensor:
    import torch  # noqa: PLC0415 -- slow

    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(path, f"{where}: {value!a:.60} is not a number")
    # an integer may be too large for a float
    scale = torch.tensor(float(max(min(value, _BEYOND), -_BEYOND)), dtype=torch.float32)
    check_scales(path, where, scale)
    return scale


def read_rank_files(found: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    """Read the scales of rank files; each file holds every layer.

    A single file needs no rank in its name.
    """
    fmt, tp = read_config(found, geometry)
    named = found.tensor_names.items()
    paths = [path for path, names in named if any(RANK_FILE_MARK in name for name in names)]
    ranks: dict[int, dict[int, torch.Tensor]] = {}
    for path in paths:
        numbers = set(map(int, _RANK.findall(path.name)))
        if not numbers and len(paths) == 1:
            numbers = {0}
        if len(numbers) != 1 or numbers <= ranks.keys():
            names = cut_list([file.name for file in paths])
            fault = f"the name of {path.name} gives no rank of its own among {names}"
            raise refusal(found.place, fault, hint="rank files are called `...rank<N>...`")
        ranks[numbers.pop()] = _read_layers(path)
    if tp is not None and len(ranks) < tp:
        fault = f"only {len(ranks)} of {tp} rank files exist ({cut_list(sorted(ranks))})"
        hint = "config.json states the number of ranks; copy all rank files"
        raise refusal(found.place, fault, hint=hint)
    return _join_ranks(found.place, geometry, ranks, files=paths, fmt=fmt)


def _read_layers(path: Path) -> dict[int, torch.Tensor]:
    import torch  # noqa: PLC0415 -- slow

    layers: dict[int, torch.Tensor] = {}
    for name, values in _read_values(path):
        parts = [part for part in name.split(".") if _LAYER.fullmatch(part)]
        index = int(parts[0]) if len(parts) == 1 and len(parts[0]) <= 9 else None
        if index is None or index in layers:
            fault = f"{shorten(name)}: the name does not contain the number of a layer of its own"
            raise refusal(path, fault, hint="exactly one part of the name must be a number")
        if values is None or values.size != 1:
            raise refusal(path, f"{shorten(name)} is not one float", hint="a scale is one float")
        with np.errstate(over="ignore"):
            layers[index] = torch.tensor(float(values.astype(np.float32).item()))
        check_scales(path, name, layers[index])
    return layers


def _read_values(path: Path) -> Iterator[tuple[str, NDArray[Any] | None]]:
    """Read the scales of a file; None for what is no float, or large."""
    if path.suffix == ".npz":
        for name, array in read_npz(path, lambda name: RANK_FILE_MARK in name).items():
            if RANK_FILE_MARK in name:
                yield name, None if array is None or array.dtype.kind != "f" else array
        return
    with TensorFile(path) as file:
        for name, entry in file.tensors.items():
            if RANK_FILE_MARK in name:
                is_one = prod(entry.shape) == 1 and file.dtype(name).is_floating_point
                yield name, file.read_floats(name) if is_one else None


def read_npz(path: Path, is_read: Callable[[str], bool]) -> dict[str, NDArray[Any] | None]:
    """Read arrays of an archive by their names; None for those that are not read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] if is_read(name) else None for name in archive.files}
    except Exception as error:  # zipfile and numpy raise ten kinds for damaged archives
        # in ASCII: the message of a damaged archive can contain its bytes
        why = f"{type(error).__name__}, {error!s:.160}".encode("ascii", "backslashreplace")
        fault = f"not a readable .npz archive: {why.decode()}"
        raise refusal(path, fault, hint="copy the file again") from error


def _join_ranks(
    path: Path,
    geometry: ModelGeometry,
    ranks: Mapping[int, Mapping[int, torch.Tensor]],
    *,
    files: Sequence[Path],
    fmt: Fp8Format | None,
    origin: CalibrationOrigin | None = None,
) -> ParsedScales:
    """Join one scale per rank and layer into [tp] for k and v of every layer.

    `ranks` maps rank -> layer index -> fp32 0-dim; layers without a KV cache are left out.
    """
    import torch  # noqa: PLC0415 -- slow

    layers = set().union(*ranks.values())
    for rank in range(len(ranks)):
        if absent := layers - ranks.get(rank, {}).keys():
            fault = f"rank {rank} has no scale for {name_ranges(absent)}, other ranks have one"
            raise refusal(path, fault, hint="there must be ranks 0 to N-1, each with all layers")
    count, owners = len(geometry.layers), geometry.owners()
    if extra := [index for index in layers if index >= count]:
        fault = f"there are scales for {name_ranges(extra)}, but the model has {count} layers"
        raise refusal(path, fault, hint=OTHER_MODEL)
    if missing := [index for index in owners if index not in layers]:
        raise missing_layers(path, missing, of=len(owners))
    values = {
        attention.site(role): torch.stack([ranks[rank][layer.index] for rank in range(len(ranks))])
        for layer, attention in geometry.attentions()
        if layer.index in layers
        for role in KV_ROLES
    }
    return ParsedScales(
        values=values,
        tp=len(ranks),
        fmt=fmt,
        origin=origin,
        files=tuple(files),
        notes=(ONE_FILLS_BOTH,),
    )
