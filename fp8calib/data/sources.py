"""Read rows from files, the hub and the built-in text, and mix several sources by weight."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from fp8calib.data.rows import FIELDS, MASK, Row, parse_row
from fp8calib.data.specs import DataSpec, FileSource, HubSource
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


def iter_rows(spec: DataSpec, *, part: BuiltinPart = "calibrate") -> Iterator[Row]:
    """Yield the rows of one spec.

    Raises:
        DataError: a row cannot be read, or a file holds no rows.

    """
    match spec.source:
        case FileSource(paths=paths):
            for path in paths:
                yield from iter_file_rows(path)
        case HubSource() as source:
            yield from _require_rows(_read_hub(source), spec.label)
        case _:
            yield from iter_builtin_rows(part)


def iter_file_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one data file; its suffix selects the format."""
    try:
        yield from _require_rows(_READERS[path.suffix.lower()](path), path.name)
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


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            origin = f"{path.name}:{number}"
            line = _decode(raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw, origin)
            if line.strip():
                yield parse_row(_parse_json(line.rstrip("\r\n"), origin), origin)


def _read_json(path: Path) -> Iterator[Row]:
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path.name)
    if not text.strip():
        return
    for number, value in enumerate(_find_rows(_parse_json(text, path.name), path.name), start=1):
        origin = f"{path.name} row {number}"
        yield parse_row(value, origin)


def _read_txt(path: Path) -> Iterator[Row]:
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path.name)
    if text:
        yield parse_row({"text": text}, path.name)


def _read_parquet(path: Path) -> Iterator[Row]:
    for number, value in enumerate(_iter_parquet_values(path), start=1):
        yield parse_row(value, f"{path.name} row {number}")


def _iter_parquet_values(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  slow, rarely needed
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            # Other columns may hold images: they are named in errors, but not decoded.
            columns = [name for name in names if name in (*FIELDS, MASK)]
            unread = dict.fromkeys(name for name in names if name not in columns)
            for batch in file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=columns):
                yield from ({**unread, **value} for value in batch.to_pylist())
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            f"{path.name}: not a readable parquet file ({first_line(error)})",
            hint="write the file again, or use a .jsonl file",
        ) from error


def _read_hub(source: HubSource) -> Iterator[Row]:
    for number, value in enumerate(_iter_hub_values(source), start=1):
        # Hub datasets such as wikitext have blank rows, which the user cannot remove.
        yield parse_row(value, f"hub:{source.name} row {number}", allow_blank=True)


def _iter_hub_values(source: HubSource) -> Iterator[Any]:
    try:
        from datasets import load_dataset  # noqa: PLC0415  takes seconds to import

        yield from load_dataset(source.name, source.config, split=source.split, streaming=True)
    except Exception as error:  # the hub's failures share no base class
        raise DataError(
            f"hub:{source.name}, config {source.config or 'default'}, split {source.split}: "
            "the hub cannot be reached or has no such dataset "
            f"({type(error).__name__}: {first_line(error)})",
            hint="check name, configuration and split, or name a local file with --data",
        ) from error


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


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
