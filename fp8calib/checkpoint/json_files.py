"""Load the JSON files of a checkpoint folder, within a size limit; some parsers are strict."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

from fp8calib.errors import ModelError

MAX_JSON_BYTES = 100_000_000


def load_json(path: Path, *, parse: Callable[[str], object] = json.loads) -> object:
    """Load a JSON file; with `json.loads` the last of equal keys wins, and NaN is a number.

    Raises:
        ValueError: it is not UTF-8, not JSON, nested too deeply, larger than 100 MB, or a pipe.
        OSError: it cannot be read.
    """
    status = path.stat()
    if stat.S_ISFIFO(status.st_mode) or status.st_size > MAX_JSON_BYTES:
        raise ValueError("larger than 100 MB, or a pipe")
    try:
        return parse(path.read_bytes().decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_json_object(
    path: Path, *, parse: Callable[[str], object] = json.loads
) -> dict[str, object]:
    """Load a JSON file that holds an object, its keys in the file's order.

    Raises:
        ModelError: the file cannot be read, or is not a JSON object.
    """
    try:
        document = load_json(path, parse=parse)
    except (OSError, ValueError) as error:
        why, hint = str(error), "the file may be truncated; JSON is UTF-8 without a BOM"
        if isinstance(error, OSError):
            why, hint = error.strerror or why, ""
        raise ModelError(f"{path}: cannot be read as JSON: {why}", hint=hint) from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: not a JSON object")
    return document


def is_result(path: Path) -> bool:
    """Whether a file holds what a command prints with `--json`, which many keep as a report."""
    if path.suffix != ".json":
        return False
    try:
        document = load_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "schema_version" in document


def encode_json(document: object) -> bytes:
    """Encode a JSON file as Hugging Face's tools do."""
    return (json.dumps(document, indent=2) + "\n").encode()


def parse_unique_keys(text: str) -> object:
    """Parse JSON; no object may repeat a key.

    Raises:
        ValueError: it is not JSON, or repeats a key.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key!a:.200} occurs twice")
        fields[key] = value
    return fields
