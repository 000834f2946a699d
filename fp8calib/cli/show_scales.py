"""Tables of a file of scales: safetensors, an overlay folder, or a JSON dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.header import load_unique_json
from fp8calib.checkpoint.reader import Checkpoint
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.cli.console import print_json, print_table
from fp8calib.errors import DataError, UsageError

_SCALE_SUFFIXES = ("_scale", "_scale_inv", "kv_cache_scaling_factor", ".scale")
_FEW_VALUES = 8


def show_scales(path: Path, *, as_json: bool) -> None:
    """Print every scale a file holds, exactly as it stands there.

    Raises:
        UsageError: the file is of no kind that holds scales, or holds none.
        DataError: it cannot be read.
    """
    rows = sorted(_rows(path), key=_natural_key)
    if not rows:
        raise UsageError(f"{path} holds no scales", hint="show reads stats and files of scales")
    if as_json:
        print_json({"scales": dict(rows)})
        return
    print_table(str(path), ["scale", "value"], [[name, _spell(values)] for name, values in rows])


def _rows(path: Path) -> Iterator[tuple[str, list[float]]]:
    if path.is_dir():
        with Checkpoint.open(path) as checkpoint:
            for name in filter(_is_scale, checkpoint.tensors):
                yield name, checkpoint.read(name).float().flatten().tolist()
    elif path.suffix == ".safetensors":
        with TensorFile(path) as file:
            for name in filter(_is_scale, file.tensors):
                yield name, file.read(name).float().flatten().tolist()
    elif path.suffix == ".json":
        yield from _json_rows(path)
    else:
        raise UsageError(f"{path}: neither .safetensors nor .json nor a checkpoint folder")


def _is_scale(name: str) -> bool:
    return name.endswith(_SCALE_SUFFIXES)


def _json_rows(path: Path) -> Iterator[tuple[str, list[float]]]:
    try:
        document = load_unique_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    if isinstance(document, dict) and "kv_cache" in document:
        yield from _numbers(document, prefix="")


def _natural_key(row: tuple[str, list[float]]) -> list[tuple[int, str]]:
    """Sort layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in row[0].split(".")]


def _numbers(node: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, list[float]]]:
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from _numbers(value, prefix=name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, [float(value)]


def _spell(values: list[float]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:_FEW_VALUES])
    more = len(values) - _FEW_VALUES
    return f"{shown} and {more} more" if more > 0 else shown
