"""Read rows from files, datasets and the built-in text, and mix several sources by weight."""

from __future__ import annotations

import json
import random
from bisect import bisect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fp8calib.data.rows import COLUMNS, MASK, ReadRow, Row, parse_row
from fp8calib.data.specs import DataSpec, HubSource, Specs, looks_like_spec
from fp8calib.errors import DataError, UsageError, first_line

BuiltinPart = Literal["calibrate", "verify"]
"""Which part of the built-in text is read; other sources have no parts."""

_PARQUET_ROWS_AT_ONCE = 64
_LARGEST_COUNTED = 2**28
"""Bytes; the rows of a larger file are not counted."""
_Values = Iterator[tuple[str, object]]
"""(origin, value) pairs: a value is a row as the file holds it, a `Row`, or a row's error."""


def split_data(
    data: str | Path | Iterable[Any] | None, *, text_column: str | None = None
) -> tuple[tuple[str, ...], Iterator[ReadRow] | None]:
    """Take `data` for specs (a string, a path, several paths), else for rows in memory.

    Rows that are mappings are read from `text_column` if given (see `parse_row`).

    Returns:
        The specs, and the rows; None if `data` is specs or None.
    """
    if data is None or isinstance(data, str | Path):
        return (() if data is None else (str(data),)), None
    if isinstance(data, Specs):
        return data, None
    if isinstance(data, Mapping | bytes) or not isinstance(data, Iterable):
        raise DataError(
            f"data: it is {type(data).__name__}, not rows",
            hint="pass one spec, or a list of texts, paths, 1-D tensors of token ids, or rows",
        )
    items = iter(data)
    first = next(items, None)
    if isinstance(first, Path):
        return tuple(map(str, (first, *items))), None
    numbered = enumerate(items if first is None else chain([first], items))
    return (), (_make_row(item, f"row {index}", text_column) for index, item in numbered)


def _make_row(item: object, origin: str, text_column: str | None) -> ReadRow:
    if isinstance(item, np.ndarray | torch.Tensor):
        item = item.tolist()
    if isinstance(item, list | tuple) and all(type(token) is int for token in item):
        return parse_row({"input_ids": list(item)}, origin)
    if isinstance(item, str):
        if looks_like_spec(item):
            raise UsageError(
                f"data: {origin} is {item!r}, which names data; a list of strings is a list of "
                "texts",
                hint="pass one spec as a string of its own, several as pathlib.Path",
            )
        return parse_row({"text": item}, origin)
    try:
        return parse_row(item, origin, text_column=text_column)
    except DataError as error:  # the row is counted as unusable
        return error


def mix_rows(
    sources: Sequence[tuple[Iterator[ReadRow], float | None]], *, seed: int = 0
) -> Iterator[ReadRow]:
    """Join the rows of (rows, weight) pairs.

    Each row is drawn from a source that is not exhausted, with a probability proportional to its
    weight (1 by default). The order within a source never changes.
    """
    rng = random.Random(seed)  # noqa: S311  an order, not a secret
    left = [(rows, 1.0 if weight is None else weight) for rows, weight in sources]
    while left:
        # Only random() gives the same numbers in every version of Python, so choices() is not used.
        ends = list(accumulate(weight for _, weight in left))
        index = min(bisect(ends, rng.random() * ends[-1]), len(ends) - 1)
        row = next(left[index][0], None)
        if row is None:
            del left[index]
        else:
            yield row


def iter_rows(
    spec: DataSpec, *, part: BuiltinPart = "calibrate", text_column: str | None = None
) -> Generator[ReadRow]:
    """Yield the rows of a spec, read from `text_column` if given (see `parse_row`).

    A row that cannot be used is yielded as its error.
    """
    for place in spec.files or (spec.source,):
        name = spec.label
        # Datasets such as wikitext have blank rows, which the user cannot remove.
        options: dict[str, Any] = {"text_column": text_column, "allow_blank": not spec.files}
        if place is None:
            values = _read_builtin(part)
        elif isinstance(place, tuple) or not spec.files:
            values = _read_dataset(place, name)
            options["folder"] = place if isinstance(place, Path) else Path()
        else:
            name, suffix = place.name, place.suffix.lower()
            values = _READERS[suffix](place, text_column)
            options["folder"] = place.parent
            if suffix == ".txt":  # without columns
                options["text_column"] = None
        row: ReadRow | None = None
        try:
            for origin, value in values:
                if isinstance(value, Row | DataError):
                    row = value
                else:
                    try:
                        row = parse_row(value, origin, **options)
                    except DataError as error:
                        row = error
                yield row
        except OSError as error:
            raise DataError(
                f"{place}: cannot be read ({error.strerror or error})", hint="check its permissions"
            ) from error
        if row is None:
            raise DataError(f"{name}: no rows", hint="use a file that holds data")


def count_rows(spec: DataSpec, part: BuiltinPart) -> int | None:
    """Count the rows of a spec; None for a dataset, and for files too large to count quickly."""
    if spec.source is not None:
        return None
    if not spec.files:
        return sum(1 for _ in _read_builtin(part))
    if any(path.stat().st_size > _LARGEST_COUNTED for path in spec.files):
        return None
    counted = 0
    for path in spec.files:
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415  slow

            counted += int(pq.read_metadata(path).num_rows)
        elif suffix == ".jsonl":
            with path.open("rb") as file:
                counted += sum(1 for line in file if line.strip())
        else:
            counted += sum(1 for _ in _READERS[suffix](path, None))
    return counted


def _read_builtin(part: BuiltinPart) -> _Values:
    """Yield a row per topic of Python's own `help()`, sorted by name.

    A topic belongs to `calibrate` if it ends within the first 80 % of all characters, otherwise to
    `verify`. `verify` excludes topics whose text a longer topic of `calibrate` repeats ("try",
    "while", "with").
    """
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  half a megabyte, rarely needed
    except ImportError as error:
        raise DataError(
            "builtin: this Python has no pydoc_data, which holds the text of help()",
            hint="use --data with a data file",
        ) from error
    texts = {name: text.strip() + "\n" for name, text in sorted(topics.items()) if text.strip()}
    ends = list(accumulate(map(len, texts.values())))
    to_calibrate = {name for name, end in zip(texts, ends, strict=True) if 5 * end <= 4 * ends[-1]}
    known = {line for name in to_calibrate for line in texts[name].splitlines()}
    for name, text in texts.items():
        lines = [line for line in text.splitlines() if line.strip()]
        is_repeated = 2 * sum(line in known for line in lines) > len(lines)
        own_part = "calibrate" if name in to_calibrate else None if is_repeated else "verify"
        if part == own_part:
            yield f"builtin:{name}", Row(f"builtin:{name}", text=text)


def _read_jsonl(path: Path, _column: str | None) -> _Values:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            origin = f"{path.name}:{number}"
            value: object
            try:
                line = _decode(raw, origin)
                value = _parse_json(line.rstrip("\r\n"), origin) if line.strip() else None
            except DataError as error:
                value = error
            if value is not None or line.strip():  # a blank line is not a row
                yield origin, value


def _read_json(path: Path, _column: str | None) -> _Values:
    text = _decode(path.read_bytes(), path.name)
    if not text.strip():
        return
    try:
        value = _parse_json(text, path.name)
    except DataError as error:
        try:  # many tools write lines of JSON under this suffix
            _parse_json(text.lstrip().partition("\n")[0], path.name)
        except DataError:
            raise error from None
        yield from _read_jsonl(path, _column)
        return
    candidates = list(value.values()) if isinstance(value, dict) else [value]
    lists = [item for item in candidates if isinstance(item, list)]
    if len(lists) != 1:
        raise DataError(
            f"{path.name}: holds neither a list of rows nor an object with one list of rows",
            hint="write [{...}, {...}], or one object per line in a .jsonl file",
        )
    for number, row in enumerate(lists[0], start=1):
        yield f"{path.name} row {number}", row


def _read_txt(path: Path, _column: str | None) -> _Values:
    if text := _decode(path.read_bytes(), path.name):
        yield path.name, {"text": text}


def _read_parquet(path: Path, text_column: str | None) -> _Values:
    import pyarrow as pa  # noqa: PLC0415  slow, rarely needed
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            wanted = COLUMNS if text_column is None else {text_column, MASK}
            columns = [name for name in names if name in wanted]
            batches = file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=columns)
            values = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, value in enumerate(values, start=1):
                # columns that are not read have a value, of no kind that a row may have
                yield f"{path.name} row {number}", {**dict.fromkeys(names, ...), **value}
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            f"{path.name}: not a readable parquet file ({first_line(error)})",
            hint="write the file again, or use a .jsonl file",
        ) from error


_READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _read_dataset(source: HubSource | Path, label: str) -> _Values:
    try:
        import datasets  # noqa: PLC0415  takes seconds to import

        if isinstance(source, Path):
            dataset = datasets.load_from_disk(str(source)).with_format(None)
        else:
            name, config, split = source
            dataset = datasets.load_dataset(name, config, split=split, streaming=True)
        where = label if isinstance(source, Path) else f"hub:{source[0]}"
        for number, value in enumerate(_keep_encoded(dataset), start=1):
            yield f"{where} row {number}", value
    except Exception as error:  # the failures of datasets share no base class
        hint = "save it again with datasets.save_to_disk"
        if isinstance(source, tuple):
            label = f"hub:{source[0]}, config {source[1] or 'default'}, split {source[2]}"
            hint = "check name, configuration and split, or use --data with a local file"
        why = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{label}: the dataset cannot be read ({why})", hint=hint) from error


def _keep_encoded(dataset: Any) -> Any:
    """Leave the media of a dataset as bytes or paths: only rows that are used are decoded."""
    for name, feature in (getattr(dataset, "features", None) or {}).items():
        item = getattr(feature, "feature", feature)  # a list has its items' feature
        if type(item).__name__ in {"Image", "Audio", "Video"}:
            encoded = type(item)(decode=False)
            dataset = dataset.cast_column(
                name, encoded if item is feature else type(feature)(encoded)
            )
    return dataset


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # without the mark that Windows writes
    except UnicodeDecodeError as error:
        message = f"{where}: not UTF-8 at byte {error.start}"
        raise DataError(message, hint="save the file as UTF-8") from error


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise DataError(
            f"{where}: not JSON, {first_line(error)}",
            hint="a .jsonl file holds one object per line, a .json file one list of objects",
        ) from error
