"""Tables of a file of scales: safetensors, an overlay folder, JSON, or rank files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import PACKED_BITS
from fp8calib.checkpoint.json_files import parse_strict
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import GGUF_HINT
from fp8calib.cli.console import print_json, print_table, print_text
from fp8calib.cli.show.summary import TABLES_HINT, summarize_scales
from fp8calib.cli.show.tables import Tables
from fp8calib.dialects.kv.rank_files import list_arrays, read_number
from fp8calib.dialects.registry import list_json_keys, list_scale_suffixes
from fp8calib.errors import ModelError, shorten

_RANK_FILE_SUFFIXES = (".npz", ".safetensors")
_INDEX = re.compile(r"[0-9]{1,9}")
_KV_SUFFIXES = ("k_scale", "v_scale", "q_scale", "kv_scale", "kv_cache_scaling_factor")
_FEW_VALUES = 8
_MOST_VALUES = 1 << 16
"""A larger tensor is only described: a list of its values takes 30 times the file's size."""

ScaleRow = tuple[str, list[float] | str]
"""A scale's name, and its values or a description of them."""


def show_scales(path: Path, tables: Tables, *, as_json: bool) -> None:
    """Print what stands out among the scales of a file, or a table of them, exactly as stored.

    Raises:
        ModelError: the file is of an unsupported kind, holds no scales, or cannot be read.
    """
    rows = sorted(_list_rows(path), key=_natural_key)
    if not rows:
        raise ModelError(f"{path} holds no scales", hint="pass statistics or a file of scales")
    if as_json:
        print_json({"scales": {name: _make_json(values) for name, values in rows}})
        return
    if tables is Tables.NONE:
        print_text(f"{shorten(str(path))}: {len(rows):,} scales")
        for text in summarize_scales(rows):
            print_text(text)
        print_text(TABLES_HINT)
        return
    if tables is Tables.KV:
        rows = [row for row in rows if row[0].endswith(_KV_SUFFIXES)]
    shown = [[shorten(name), _format_values(values)] for name, values in rows]
    print_table(shorten(str(path)), ["scale", "value"], shown)


def _list_rows(path: Path) -> Iterator[ScaleRow]:
    if path.is_dir() and (ranks := _list_rank_files(path)):
        for each in ranks:
            yield from ((f"{each.name}.{name}", values) for name, values in _list_rows(each))
    elif path.is_dir():
        with Checkpoint.open(path) as checkpoint:
            yield from _list_tensor_rows(checkpoint)
    elif path.suffix == ".safetensors":
        with TensorFile(path) as file:
            yield from _list_tensor_rows(file)
    elif path.suffix == ".json":
        yield from _list_json_rows(path)
    elif path.suffix == ".npz":
        for name in list_arrays(path):
            if name.endswith(list_scale_suffixes()):
                yield name, read_number(path, name).flatten().tolist()
    else:
        kinds = ".safetensors, .npz or .json"
        hint = GGUF_HINT if path.suffix == ".gguf" else "name statistics or scales"
        raise ModelError(f"{path}: neither a {kinds} file nor a checkpoint folder", hint=hint)


def _list_rank_files(folder: Path) -> list[Path]:
    """List the files of TensorRT-LLM's and AMMO's ranks; a checkpoint has none."""
    return [
        path for path in sorted(folder.glob("*rank[0-9]*")) if path.suffix in _RANK_FILE_SUFFIXES
    ]


def _list_tensor_rows(file: TensorFile | Checkpoint) -> Iterator[ScaleRow]:
    for name, entry in file.tensors.items():
        if not name.endswith(list_scale_suffixes()):
            continue
        if math.prod(entry.shape) > _MOST_VALUES or entry.dtype in PACKED_BITS:
            yield name, f"{entry.dtype} of shape {list(entry.shape)}"
        else:
            yield name, file.read(name).float().flatten().tolist()


def _list_json_rows(path: Path) -> Iterator[ScaleRow]:
    try:
        document = parse_strict(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fault = shorten(str(error))
        raise ModelError(f"{path}: cannot be read as JSON: {fault}") from error
    if isinstance(document, dict) and any(keys[0] in document for keys in list_json_keys()):
        yield from _list_numbers(document)


def _natural_key(row: ScaleRow) -> list[tuple[int, str]]:
    """Sort layer 2 before layer 10."""
    parts = row[0].split(".")
    return [(int(part), "") if _INDEX.fullmatch(part) else (-1, part) for part in parts]


def _list_numbers(document: Mapping[str, object]) -> Iterator[ScaleRow]:
    """List all numbers of a document; without recursion, as it may be deeply nested."""
    waiting: list[tuple[str, object]] = list(document.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += ((f"{name}.{key}", inner) for key, inner in value.items())
        elif isinstance(value, float) or (type(value) is int and abs(value) < 1 << 64):
            yield name, [float(value)]
        elif type(value) is int:
            yield name, shorten(str(value))


def _make_json(values: list[float] | str) -> object:
    """Write NaN and infinities, which JSON does not have, as text."""
    if isinstance(values, str):
        return values
    return [value if math.isfinite(value) else str(value) for value in values]


def _format_values(values: list[float] | str) -> str:
    if isinstance(values, str):
        return values
    shown = ", ".join(f"{value:.6g}" for value in values[:_FEW_VALUES])
    more = len(values) - _FEW_VALUES
    return f"{shown} and {more} more" if more > 0 else shown
