"""The rows of a text that a caller passes: told from data specs, and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from fp8calib.data.rows import Row, parse_row
from fp8calib.data.specs import looks_like_spec
from fp8calib.errors import DataError, UsageError
from fp8calib.options.recipe_keys import Specs
from fp8calib.requests.shared import TextData


def list_specs(data: str | Path | Sequence[str | Path] | None) -> tuple[str, ...]:
    """List data specs, where no other data is accepted."""
    one = (data,) if isinstance(data, str | Path) else data
    return tuple(map(str, one or ()))


def split_data(
    data: TextData | None, *, text_column: str | None = None
) -> tuple[tuple[str, ...], Iterator[Row] | None]:
    """Tell specs from rows: a string or a path is a spec, and so are several paths.

    Rows that are mappings are read from `text_column` if given (see `parse_row`).

    Raises:
        DataError: there are no rows.
    """
    if data is None:
        return (), None
    if isinstance(data, str | Path):
        return (str(data),), None
    if isinstance(data, Specs):
        return data, None
    if isinstance(data, Mapping | bytes) or not isinstance(data, Iterable):
        raise DataError(
            f"data: it is {type(data).__name__}, not rows",
            hint="pass one spec, or a list of texts, paths, 1-D tensors of token ids, or rows",
        )
    items = iter(data)
    first = next(items, None)
    if first is None:
        raise DataError("data: it holds no rows", hint="leave it out for the built-in text")
    if text_column is not None and not isinstance(first, Mapping | Path):
        raise UsageError(
            f"--text-column {text_column}: the first row of data is {type(first).__name__}, "
            "without columns",
            hint="pass rows as mappings, or leave it out",
        )
    everything = chain([first], items)
    if isinstance(first, Path):
        paths = list(everything)
        if not all(isinstance(path, str | Path) for path in paths):
            raise DataError("data: paths and rows are mixed", hint="pass paths, or rows")
        return tuple(map(str, paths)), None
    return (), (
        _make_row(item, f"row {index}", text_column) for index, item in enumerate(everything)
    )


def _make_row(item: object, origin: str, text_column: str | None) -> Row:
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(item)
    if isinstance(item, list | tuple) and all(type(token) is int for token in item):
        return parse_row({"input_ids": list(item)}, origin)
    if isinstance(item, torch.Tensor):
        if item.dim() != 1 or item.dtype.is_floating_point or item.dtype == torch.bool:
            raise DataError(
                f"data: {origin} is {item.dtype} of shape {list(item.shape)}",
                hint="token ids are a 1-D tensor of integers for each row",
            )
        return parse_row({"input_ids": item.tolist()}, origin)
    if isinstance(item, str):
        if looks_like_spec(item):
            raise UsageError(
                f"data: {origin} is {item!r}, which names data; a list of strings is a list of "
                "texts",
                hint="pass one spec as a string of its own, several as pathlib.Path",
            )
        return parse_row({"text": item}, origin)
    return parse_row(item, origin, text_column=text_column)
