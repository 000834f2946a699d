"""Read rows from files, datasets and the built-in text, and mix several sources by weight."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from fp8calib.data.rows import COLUMNS, MASK, Row, parse_row
from fp8calib.data.specs import DataSpec, FileSource, HubSource, SavedSource
from fp8calib.errors import DataError, first_line

BuiltinPart = Literal["calibrate", "verify"]
"""Which part of the built-in text is read; other sources have no parts."""

_PARQUET_ROWS_AT_ONCE = 64


def mix_rows(
    sources: Sequence[tuple[Iterator[Row], float | None]], *, seed: int = 0
) -> Iterator[Row]:
    """Join the rows of (rows, weight) pairs.

    If no source has a weight, they are read one after another. Otherwise each row is drawn from a
    source that is not exhausted, with a probability proportional to its weight (1 by default). The
    order within a source never changes.
    """
    if all(weight is None for _, weight in sources):
        return chain.from_iterable(rows for rows, _ in sources)
    weighted = [(rows, 1.0 if weight is None else weight) for rows, weight in sources]
    return _draw_rows(weighted, random.Random(seed))  # noqa: S311  an order, not a secret


def iter_rows(
    spec: DataSpec, *, part: BuiltinPart = "calibrate", text_column: str | None = None
) -> Iterator[Row]:
    """Yield the rows of one spec, read from `text_column` if given (see `parse_row`).

    Raises:
        DataError: a row cannot be read, or a file holds no rows.

    """
    match spec.source:
        case FileSource(paths=paths):
            for path in paths:
                yield from iter_file_rows(path, text_column=text_column)
        case HubSource() as source:
            values = _iter_hub_values(source)
            rows = _parse_dataset(values, f"hub:{source.name}", text_column, Path())
            yield from _require_rows(rows, spec.label)
        case SavedSource(folder=folder):
            values = _iter_saved_values(folder, spec.label, text_column)
            rows = _parse_dataset(values, spec.label, text_column, folder)
            yield from _require_rows(rows, spec.label)
        case _:
            yield from iter_builtin_rows(part)


def iter_file_rows(path: Path, *, text_column: str | None = None) -> Iterator[Row]:
    """Yield the rows of one data file; its suffix selects the format."""
    suffix = path.suffix.lower()
    column = None if suffix == ".txt" else text_column
    values = _iter_parquet(path, column) if suffix == ".parquet" else _READERS[suffix](path)
    rows = (
        parse_row(value, origin, text_column=column, folder=path.parent) for origin, value in values
    )
    try:
        yield from _require_rows(rows, path.name)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error})", hint="check its permissions"
        ) from error


def iter_builtin_rows(part: BuiltinPart) -> Iterator[Row]:
    """Yield one row per topic of Python's own `help()`, sorted by name.

    A topic belongs to `calibrate` if it ends within the first 80 % of all characters, otherwise to
    `verify`. `verify` excludes topics whose text a longer topic of `calibrate` repeats ("try",
    "while", "with").
    """
    calibrate, verify = _split_topics()
    for name, text in calibrate.items() if part == "calibrate" else verify.items():
        yield Row(f"builtin:{name}", text=text)


def _draw_rows(sources: list[tuple[Iterator[Row], float]], rng: random.Random) -> Iterator[Row]:
    while sources:
        index = _draw_index([weight for _, weight in sources], rng)
        row = next(sources[index][0], None)
        if row is None:
            del sources[index]
        else:
            yield row


def _draw_index(weights: list[float], rng: random.Random) -> int:
    # Only random() gives the same numbers in every version of Python, so choices() is not used.
    ends = list(accumulate(weights))
    point = rng.random() * ends[-1]
    return next((index for index, end in enumerate(ends) if point < end), len(ends) - 1)


def _split_topics() -> tuple[dict[str, str], dict[str, str]]:
    topics = _load_topics()
    total = sum(map(len, topics.values()))
    names = sorted(topics)
    ends = dict(zip(names, accumulate(len(topics[name]) for name in names), strict=True))
    calibrate = {name: topics[name] for name, end in ends.items() if 5 * end <= 4 * total}
    seen = frozenset(line for text in calibrate.values() for line in text.splitlines())
    verify = {
        name: topics[name]
        for name in ends
        if name not in calibrate and not _is_repeated(topics[name], seen)
    }
    return calibrate, verify


def _is_repeated(text: str, seen: Set[str]) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(line in seen for line in lines) > len(lines)


def _load_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  half a megabyte, rarely needed
    except ImportError as error:
        raise DataError(
            "builtin: this Python has no pydoc_data, which holds the text of help()",
            hint="name a data file with --data",
        ) from error
    return {name: text.strip() + "\n" for name, text in topics.items() if text.strip()}


def _require_rows(rows: Iterator[Row], where: str) -> Iterator[Row]:
    first = next(rows, None)
    if first is None:
        raise DataError(f"{where}: no rows", hint="use a file that holds data")
    yield first
    yield from rows


def _parse_dataset(
    values: Iterator[Any], name: str, text_column: str | None, folder: Path
) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        # Datasets such as wikitext have blank rows, which the user cannot remove.
        yield parse_row(
            value,
            f"{name} row {number}",
            allow_blank=True,
            text_column=text_column,
            folder=folder,
        )


_Values = Iterator[tuple[str, object]]
"""Decoded rows of a file, each after its origin."""


def _read_jsonl(path: Path) -> _Values:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            origin = f"{path.name}:{number}"
            line = _decode(raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw, origin)
            if line.strip():
                yield origin, _parse_json(line.rstrip("\r\n"), origin)


def _read_json(path: Path) -> _Values:
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path.name)
    if not text.strip():
        return
    for number, value in enumerate(_find_rows(_parse_json(text, path.name), path.name), start=1):
        yield f"{path.name} row {number}", value


def _read_txt(path: Path) -> _Values:
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path.name)
    if text:
        yield path.name, {"text": text}


def _iter_parquet(path: Path, text_column: str | None) -> _Values:
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  slow, rarely needed
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            columns = _choose_columns(names, text_column)
            batches = file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=columns)
            values = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, value in enumerate(values, start=1):
                yield f"{path.name} row {number}", {**dict.fromkeys(names), **value}
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            f"{path.name}: not a readable parquet file ({first_line(error)})",
            hint="write the file again, or use a .jsonl file",
        ) from error


def _choose_columns(names: Sequence[str], text_column: str | None) -> list[str]:
    """List the columns that rows are read from."""
    wanted = {text_column, MASK} if text_column is not None else COLUMNS
    return [name for name in names if name in wanted]


def _iter_saved_values(folder: Path, label: str, text_column: str | None) -> Iterator[Any]:
    try:
        from datasets import load_from_disk  # noqa: PLC0415  takes seconds to import

        dataset = _keep_encoded(load_from_disk(str(folder)))
        names = dataset.column_names
        columns = _choose_columns(names, text_column)
        if not columns and len(dataset):
            yield dict.fromkeys(names)  # refused, with the names of the columns
        for value in dataset.select_columns(columns).with_format(None):
            yield {**dict.fromkeys(names), **value}
    except Exception as error:  # the failures of datasets share no base class
        raise DataError(
            f"{label}: the dataset cannot be read ({type(error).__name__}: {first_line(error)})",
            hint="save it again with datasets.save_to_disk",
        ) from error


def _iter_hub_values(source: HubSource) -> Iterator[Any]:
    try:
        from datasets import load_dataset  # noqa: PLC0415  takes seconds to import

        dataset = load_dataset(source.name, source.config, split=source.split, streaming=True)
        yield from _keep_encoded(dataset)
    except Exception as error:  # the hub's failures share no base class
        raise DataError(
            f"hub:{source.name}, config {source.config or 'default'}, split {source.split}: "
            "the hub cannot be reached or has no such dataset "
            f"({type(error).__name__}: {first_line(error)})",
            hint="check name, configuration and split, or name a local file with --data",
        ) from error


def _keep_encoded(dataset: Any) -> Any:
    """Leave the media of a dataset as bytes or paths: few rows are decoded."""
    for name, feature in (getattr(dataset, "features", None) or {}).items():
        held = getattr(feature, "feature", feature)  # a list has its items' feature
        if type(held).__name__ in {"Image", "Audio", "Video"}:
            encoded = type(held)(decode=False)
            dataset = dataset.cast_column(
                name, encoded if held is feature else type(feature)(encoded)
            )
    return dataset


def _find_rows(value: object, where: str) -> list[Any]:
    candidates = list(value.values()) if isinstance(value, dict) else [value]
    lists = [item for item in candidates if isinstance(item, list)]
    if len(lists) == 1:
        return lists[0]
    raise DataError(
        f"{where}: holds neither a list of rows nor an object with one list of rows",
        hint="write [{...}, {...}], or one object per line in a .jsonl file",
    )


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        message = f"{where}: not UTF-8 at byte {error.start}"
        raise DataError(message, hint="save the file as UTF-8") from error


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON, {error.msg} (line {error.lineno}, column {error.colno})",
            hint="a .jsonl file holds one object per line, a .json file one list of objects",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: JSON cannot be read ({first_line(error)})",
            hint="the row holds a number with too many digits, or is nested too deeply",
        ) from error


_READERS: dict[str, Callable[[Path], _Values]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".txt": _read_txt,
}
