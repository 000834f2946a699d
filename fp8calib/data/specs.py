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
# Unlike the methods of Path, these are false if a name is too long or a folder may not be read.
_exists, _is_dir, _is_file = os.path.exists, os.path.isdir, os.path.isfile


class Specs(tuple[str, ...]):
    """Data specs from `--data`; any other list of strings is a list of texts."""


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


@dataclass(frozen=True)
class DataSpec:
    """One resolved `--data` option."""

    source: FileSource | HubSource | SavedSource | BuiltinSource
    label: str
    """The spec as given, but only the last component of a path; it is stored in artifacts."""
    weight: float | None = None
    """Share of the rows when specs are mixed; None when the spec has no weight."""


def parse_spec(text: str) -> DataSpec:
    """Resolve one SPEC against the file system.

    A path that exists is used as written, even if it contains '@' or ':'. Otherwise a number after
    the last '@' is a weight. `builtin` always means the built-in text (`./builtin` is a folder).

    Raises:
        UsageError: the spec has none of the accepted forms, or its weight is not positive.
        DataError: the file or folder does not exist, or the folder holds no data file.

    """
    body, weight = _split_weight(text)
    if not body.strip():
        raise UsageError(f"--data {text!r}: the spec is empty", hint=_SPEC_HINT)
    after = text[len(body) :]
    folder, split = _split_saved(body)
    label = Path(folder).absolute().name or folder
    if body == "builtin":
        return DataSpec(BuiltinSource(), text, weight)
    if body.startswith("hub:") and not _is_data_path(body):
        return DataSpec(_parse_hub(body), text, weight)
    if split or _is_file(Path(folder) / _SPLITS_FILE):
        source = _find_split(Path(folder), split, body)
        return DataSpec(source, f"{label}:{split}{after}" if split else label + after, weight)
    if _is_saved(Path(folder)):
        return DataSpec(SavedSource(Path(folder)), label + after, weight)
    return DataSpec(_find_files(Path(body), body), label + after, weight)


def looks_like_spec(text: str) -> bool:
    """Whether a text is more likely meant as a spec: it names data, and is no text to run."""
    is_named = text == "builtin" or text.startswith("hub:")
    return is_named or _is_data_path(text) or bool(_split_saved(text)[1])


def _split_weight(text: str) -> tuple[str, float | None]:
    body, separator, number = text.rpartition("@")
    try:
        weight = float(number)
    except ValueError:
        return text, None
    if not separator or _is_data_path(text):
        return text, None
    if not math.isfinite(weight) or weight <= 0:
        raise UsageError(
            f"--data {text}: the weight {number} is not a positive finite number",
            hint="use a positive weight such as @0.5, or omit the spec",
        )
    return body, weight


def _split_saved(text: str) -> tuple[str, str]:
    """Split FOLDER:SPLIT of a folder that `datasets` saved; any other text has no split."""
    folder, _, split = text.rpartition(":")
    if not (folder and split) or _is_dir(text):
        return text, ""
    is_saved = _is_file(Path(folder) / _SPLITS_FILE) or _is_saved(Path(folder))
    return (folder, split) if is_saved else (text, "")


def _is_saved(folder: Path) -> bool:
    return all(_is_file(folder / name) for name in _SAVED_FILES)


def _find_split(folder: Path, split: str, body: str) -> SavedSource:
    """Find a split of a saved DatasetDict; without a name, the only one."""
    path = folder / _SPLITS_FILE
    if not _is_file(path):
        raise UsageError(
            f"--data {body}: the folder is one dataset, without splits", hint=f"use {folder}"
        )
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        if not isinstance(splits, list) or any(
            not isinstance(name, str) or name in {"", ".", ".."} or "/" in name for name in splits
        ):
            raise ValueError("`splits` must be a list of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"--data {body}: {path} cannot be read ({first_line(error)})",
            hint="save the dataset again with datasets.save_to_disk",
        ) from error
    if not split and len(splits) > 1:
        raise UsageError(
            f"--data {body}: the folder has the splits {cut_list(splits)}",
            hint=f"name one: {folder}:{shorten(splits[0])}",
        )
    name = split or "".join(splits)
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


def _find_files(path: Path, body: str) -> FileSource:
    if _is_dir(path):
        return _list_folder(path, body)
    suffix = path.suffix.lower()
    if suffix not in ACCEPTED_SUFFIXES and (suffix or _is_file(path)):
        ending = f"the suffix {suffix!r}" if suffix else "a file without suffix"
        raise UsageError(
            f"--data {body}: {ending} is not accepted; accepted are {', '.join(ACCEPTED_SUFFIXES)}",
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
    paths = tuple(e for e in entries if _is_file(e) and e.suffix.lower() in ACCEPTED_SUFFIXES)
    if not paths:
        raise DataError(
            f"--data {body}: the folder holds no {', '.join(ACCEPTED_SUFFIXES)} file",
            hint="name the folder that holds the files; its subfolders are not searched",
        )
    return FileSource(paths, tuple(entry.name for entry in entries if entry not in paths))


def _is_data_path(text: str) -> bool:
    return _is_dir(text) or (_is_file(text) and Path(text).suffix.lower() in ACCEPTED_SUFFIXES)
