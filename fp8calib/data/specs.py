"""Parse `--data SPEC`: files, a hub dataset or the built-in text, with an optional weight."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from fp8calib.errors import DataError, UsageError, cut_list, first_line, shorten

ACCEPTED_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
"""The suffixes of data files, in upper or lower case."""

_SPEC_HINT = (
    f"use a file ({', '.join(ACCEPTED_SUFFIXES)}), a folder of them or one of "
    "datasets.save_to_disk[:SPLIT], hub:NAME[:CONFIG][:SPLIT] or builtin; SPEC@WEIGHT mixes several"
)
# What datasets.save_to_disk writes: into the folder of a DatasetDict, and into that of a Dataset.
_SPLITS_FILE = "dataset_dict.json"
_SAVED_FILES = ("dataset_info.json", "state.json")
# A single word after `hub:NAME:` is a split if it is one of these, else a configuration.
_SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev"})


@dataclass(frozen=True)
class FileSource:
    """One file, or the files of one folder sorted by name."""

    paths: tuple[Path, ...]
    ignored: tuple[str, ...] = ()
    """Other entries of the folder, by name; hidden ones are not listed."""


@dataclass(frozen=True)
class HubSource:
    """One split of a dataset on the Hugging Face hub."""

    name: str
    config: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class SavedSource:
    """A folder that `datasets.Dataset.save_to_disk` wrote, or a split of a `DatasetDict`."""

    folder: Path


@dataclass(frozen=True)
class BuiltinSource:
    """The text of `help()`, which is part of CPython."""


Source = FileSource | HubSource | SavedSource | BuiltinSource


@dataclass(frozen=True)
class DataSpec:
    """One resolved `--data` option."""

    source: Source
    label: str
    """The spec as given, but of a path only its last component; it is stored in artifacts."""
    weight: float | None = None
    """Share of the rows when specs are mixed; None when the spec has no weight."""

    @property
    def has_columns(self) -> bool:
        """Whether its rows have named columns; plain text has none."""
        match self.source:
            case FileSource(paths=paths):
                return any(path.suffix.lower() != ".txt" for path in paths)
            case BuiltinSource():
                return False
        return True


def parse_spec(text: str) -> DataSpec:
    """Resolve one SPEC against the file system.

    A path that exists is used as written, even if it contains '@' or ':'. Otherwise a number after
    the last '@' is a weight. `builtin` always means the built-in text (`./builtin` is a folder).

    Raises:
        UsageError: the spec has none of the accepted forms, or its weight is not positive.
        DataError: the file or folder does not exist, or the folder holds no data file.

    """
    body, separator, weight = text.rpartition("@")
    if _is_data_path(text) or not separator or not _is_number(weight):
        body, weight = text, ""
    if not body.strip():
        raise UsageError(f"--data {text!r}: the spec is empty", hint=_SPEC_HINT)
    value = _parse_weight(weight, text) if weight else None
    source, label = _parse_source(body)
    return DataSpec(source, f"{label}@{weight}" if weight else label, value)


def looks_like_spec(text: str) -> bool:
    """Whether a text is more likely meant as a spec: it names data, and is no text to run."""
    is_named = text == "builtin" or text.startswith("hub:")
    return is_named or _is_data_path(text) or _is_split(text)


def _parse_source(body: str) -> tuple[Source, str]:
    if body == "builtin":
        return BuiltinSource(), body
    if body.startswith("hub:") and not _is_data_path(body):
        return _parse_hub(body), body
    path = Path(body)
    if _is_split(body):
        folder, _, split = body.rpartition(":")
        return _open_split(Path(folder), split, body), f"{Path(folder).absolute().name}:{split}"
    if _is_saved(path):
        return SavedSource(path), path.absolute().name or body
    if _is_file(path / _SPLITS_FILE):
        return _open_split(path, None, body), path.absolute().name or body
    return _parse_path(path, body), path.absolute().name or body


def _is_split(text: str) -> bool:
    """Whether a text is FOLDER:SPLIT, of a folder that `datasets` saved."""
    folder, separator, split = text.rpartition(":")
    if not (folder and separator and split) or _is_dir(text):
        return False
    return _is_file(Path(folder) / _SPLITS_FILE) or _is_saved(Path(folder))


def _is_saved(folder: Path) -> bool:
    return all(_is_file(folder / name) for name in _SAVED_FILES)


def _open_split(folder: Path, split: str | None, body: str) -> SavedSource:
    """Find a split of a saved DatasetDict; without a name, the only one.

    Raises:
        UsageError: there are several splits and none is named, or no split has that name.
        DataError: the folder is damaged.
    """
    if not _is_file(folder / _SPLITS_FILE):
        raise UsageError(
            f"--data {body}: the folder is one dataset, without splits", hint=f"use {folder}"
        )
    splits = _read_splits(folder, body)
    if split is None and len(splits) > 1:
        raise UsageError(
            f"--data {body}: the folder has the splits {cut_list(splits)}",
            hint=f"name one: {folder}:{shorten(splits[0])}",
        )
    name = splits[0] if split is None and splits else split
    if name not in splits:
        raise UsageError(
            f"--data {body}: no such split; the folder has {cut_list(splits) or 'none'}",
            hint=f"name one of them, as {folder}:SPLIT",
        )
    if not _is_saved(folder / name):
        raise DataError(
            f"--data {body}: {folder / shorten(name)} is not a saved dataset",
            hint="save it again with datasets.save_to_disk",
        )
    return SavedSource(folder / name)


def _read_splits(folder: Path, body: str) -> list[str]:
    path = folder / _SPLITS_FILE
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        if not isinstance(splits, list) or not all(map(_is_name, splits)):
            raise ValueError("`splits` must be a list of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"--data {body}: {path} cannot be read ({first_line(error)})",
            hint="save the dataset again with datasets.save_to_disk",
        ) from error
    return splits


def _is_name(value: object) -> bool:
    """Whether a value names a folder inside of another."""
    return isinstance(value, str) and value not in {"", ".", ".."} and "/" not in value


def _parse_hub(body: str) -> HubSource:
    name, *rest = body.removeprefix("hub:").split(":")
    if not name or len(rest) > 2:
        raise UsageError(
            f"--data {body}: not of the form hub:NAME[:CONFIG][:SPLIT]",
            hint="for example hub:wikitext:wikitext-2-raw-v1:test",
        )
    if len(rest) == 1:
        rest = ["", rest[0]] if rest[0] in _SPLIT_NAMES else [rest[0], ""]
    config, split = rest or ["", ""]
    return HubSource(name, config or None, split or "train")


def _parse_path(path: Path, body: str) -> FileSource:
    if _is_dir(path):
        return _list_folder(path, body)
    suffix = path.suffix.lower()
    if suffix not in ACCEPTED_SUFFIXES and (suffix or _is_file(path)):
        found = f"the suffix {suffix!r}" if suffix else "a file without suffix"
        accepted = ", ".join(ACCEPTED_SUFFIXES)
        raise UsageError(
            f"--data {body}: {found} is not accepted; accepted are {accepted}",
            hint=_SPEC_HINT,
        )
    if _exists(path) and not _is_file(path):
        raise DataError(f"--data {body}: a pipe or device", hint="write it to a file first")
    if not _is_file(path):
        raise DataError(
            f"--data {body}: no such file or folder",
            hint=f"check the path; a dataset on the hub is written hub:{body}",
        )
    return FileSource((path,))


def _list_folder(path: Path, body: str) -> FileSource:
    try:
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"--data {body}: the folder cannot be listed ({error.strerror})",
            hint="check its permissions",
        ) from error
    paths = tuple(entry for entry in entries if _is_file(entry) and _has_accepted_suffix(entry))
    if not paths:
        raise DataError(
            f"--data {body}: the folder holds no {', '.join(ACCEPTED_SUFFIXES)} file",
            hint="name the folder that holds the files; its subfolders are not searched",
        )
    return FileSource(paths, tuple(entry.name for entry in entries if entry not in paths))


def _parse_weight(weight: str, spec: str) -> float:
    value = float(weight)
    if not math.isfinite(value) or value <= 0:
        raise UsageError(
            f"--data {spec}: the weight {weight} is not a positive finite number",
            hint="use a positive weight such as @0.5, or omit the spec",
        )
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_data_path(text: str) -> bool:
    return _is_dir(text) or (_is_file(text) and _has_accepted_suffix(Path(text)))


def _has_accepted_suffix(path: Path) -> bool:
    return path.suffix.lower() in ACCEPTED_SUFFIXES


# Unlike the methods of Path, these are false if a name is too long or a folder may not be read.
_exists = os.path.exists
_is_dir = os.path.isdir
_is_file = os.path.isfile
