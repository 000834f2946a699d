"""Parse `--data SPEC`: files, a hub dataset or the built-in text, with an optional weight."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8calib.errors import DataError, UsageError

ACCEPTED_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
"""The suffixes of data files, in upper or lower case."""

_SPEC_HINT = (
    f"use a file ({', '.join(ACCEPTED_SUFFIXES)}), a folder of them or one of "
    "datasets.save_to_disk, hub:NAME[:CONFIG][:SPLIT] or builtin; SPEC@WEIGHT mixes several"
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


HubSource = tuple[str, str | None, str]
"""A dataset on the Hugging Face hub, its configuration, and a split of it."""


@dataclass(frozen=True)
class DataSpec:
    """One resolved `--data` option."""

    source: HubSource | Path | None
    """A path is a folder that `datasets.Dataset.save_to_disk` wrote (of a `DatasetDict`, that of a
    split). None are `files`, or without these the text of `help()`, which is part of CPython."""
    label: str
    """The spec as given, but only the last component of a path; it is stored in artifacts."""
    weight: float | None = None
    """Share of the rows when specs are mixed; None when the spec has no weight."""
    files: tuple[Path, ...] = ()
    """One file, or the files of one folder sorted by name."""
    ignored: tuple[str, ...] = ()
    """Other entries of the folder, by name; hidden ones are not listed."""


def parse_spec(text: str) -> DataSpec:
    """Resolve one SPEC against the file system.

    A path that exists is used as written, even if it contains '@' or ':'. Otherwise a number after
    the last '@' is a weight. `builtin` always means the built-in text (`./builtin` is a folder).
    """
    body, weight = text, None
    before, separator, number = text.rpartition("@")
    if separator and not _is_data_path(text):
        with suppress(ValueError):
            body, weight = before, float(number)
    is_hub = body.startswith("hub:") and not _is_data_path(body)
    name, *rest = body.removeprefix("hub:").split(":")
    fault, hint = "", _SPEC_HINT
    if weight is not None and not 0 < weight < math.inf:
        fault = f"the weight {number} is not a positive finite number"
        hint = "use a positive weight such as @0.5, or omit the spec"
    elif not body.strip():
        fault = "the spec is empty"
    elif is_hub and (not name or len(rest) > 2):
        fault = "not of the form hub:NAME[:CONFIG][:SPLIT]"
        hint = "for example hub:wikitext:wikitext-2-raw-v1:test"
    if fault:
        raise UsageError(f"--data {text or repr(text)}: {fault}", hint=hint)
    if body == "builtin":
        return DataSpec(None, text, weight)
    if is_hub:
        if len(rest) == 1:
            rest = ["", rest[0]] if rest[0] in _SPLIT_NAMES else [rest[0], ""]
        config, split = rest or ["", ""]
        return DataSpec((name, config or None, split or "train"), text, weight)
    path = Path(body)
    label = (path.absolute().name or body) + text[len(body) :]
    if all(_is_file(path / name) for name in _SAVED_FILES):
        return DataSpec(path, label, weight)
    return DataSpec(None, label, weight, *_find_files(path))


def looks_like_spec(text: str) -> bool:
    """Whether a text is more likely meant as a spec: it names data, and is no text to run."""
    return text == "builtin" or text.startswith("hub:") or _is_data_path(text)


def _find_files(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Find the files of a spec, and the names of what else its folder has."""
    accepted = ", ".join(ACCEPTED_SUFFIXES)
    if _is_file(path / _SPLITS_FILE):
        raise UsageError(
            f"--data {path}: the folder holds saved splits, each in a folder of its own",
            hint=f"name one of them, such as {path / 'train'}",
        )
    if _is_dir(path):
        fault, entries = f"the folder holds no {accepted} file", list[Path]()
        try:
            entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        except OSError as error:
            fault = f"the folder cannot be listed ({error.strerror})"
        paths = tuple(e for e in entries if _is_file(e) and _has_suffix(e))
        if not paths:
            hint = "name the folder that holds the files; its subfolders are not searched"
            raise DataError(f"--data {path}: {fault}", hint=hint)
        return paths, tuple(entry.name for entry in entries if entry not in paths)
    if not _has_suffix(path) and (path.suffix or _is_file(path)):
        raise UsageError(
            f"--data {path}: the suffix {path.suffix.lower()!r} is not accepted; accepted are "
            f"{accepted}",
            hint=_SPEC_HINT,
        )
    if not _is_file(path):
        raise DataError(
            f"--data {path}: {'a pipe or device' if _exists(path) else 'no such file or folder'}",
            hint="check the path; a split of a saved dataset is FOLDER/SPLIT, and a dataset on the "
            f"hub is hub:{path}",
        )
    return (path,), ()


def _has_suffix(path: Path) -> bool:
    return path.suffix.lower() in ACCEPTED_SUFFIXES


def _is_data_path(text: str) -> bool:
    return _is_dir(text) or (_is_file(text) and _has_suffix(Path(text)))
