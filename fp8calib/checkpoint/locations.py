"""Tell paths on this machine from ids on the Hub; refuse links that lead out of a folder."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.weight_index import SINGLE_FILE_NAME
from fp8calib.errors import ModelError, UsageError, shorten

HUB_FILES = [
    *("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"),
    *("LICEN[CS]E*", "NOTICE*", "*.md"),
]
"""The files of a model that are downloaded."""
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(?<!\.json)(?<!\.safetensors)(?<!\.npz)")
"""ORG/NAME; a name alone, or a file name, is a path."""
SCALES_SUFFIXES = (".json", ".safetensors", ".npz")
"""Suffixes of files that hold scales or statistics."""
_exists = os.path.exists
"""Unlike the method of Path, this is false if a name is too long or a folder may not be read."""


def find_local_model(model: str) -> Path | None:
    """Give the path of a model on this machine; None if the name may be a Hub id.

    Raises:
        ModelError: it is neither a path nor a Hub id.
    """
    path = Path(model)
    if _exists(path):
        return path
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        hint = f"{suggest_path(path, of_folders=True)}pass a folder or a hub id"
        raise ModelError(f"no model folder at {model}", hint=hint)
    return None


def may_be_on_hub(path: Path) -> bool:
    """Tell whether a path does not exist and may be meant as a Hub id."""
    return not _exists(path) and _HUB_NAME.fullmatch(str(path)) is not None


def require_path(path: Path, *, option: str = "", hint: str = "") -> None:
    """Refuse a path that does not exist, or cannot be looked up."""
    why = "no such file or folder"
    try:
        if path.exists():
            return
    except (OSError, ValueError) as error:
        why = f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
    message = f"{option} {shorten(str(path))}: {why}".strip()
    raise UsageError(message, hint=f"{suggest_path(path)}{hint}".strip())


def find_lone_file(path: Path) -> Path:
    """Give the one file of scales in a folder without a model, as of `export`; else the path."""
    if not path.is_dir() or (path / CONFIG_NAME).exists():
        return path
    files = [each for each in path.iterdir() if each.suffix in SCALES_SUFFIXES]
    return files[0] if len(files) == 1 and files[0].name != SINGLE_FILE_NAME else path


def suggest_path(path: Path, *, of_folders: bool = False) -> str:
    """Suggest the path with the most similar name in the same folder; empty if there is none.

    Where a folder above it does not exist, the name of that folder is compared.
    """
    missing = next((each for each in reversed(path.parents) if not _exists(each)), path)
    try:
        entries = missing.parent.iterdir()
        names = [entry.name for entry in entries if entry.is_dir() or not of_folders]
    except (OSError, ValueError):
        return ""
    for name in get_close_matches(missing.name, names, n=1):
        if _exists(found := missing.parent / name / path.relative_to(missing)):
            return f"did you mean {shorten(str(found))}? "
    return ""


def refuse_external_links(folder: Path) -> None:
    """Refuse a folder in which a file to be read is a link out of it; it may itself be a link."""
    for path in sorted(folder.iterdir()):
        if path.suffix in SCALES_SUFFIXES:
            refuse_external_link(path)


def refuse_external_link(path: Path) -> None:
    """Refuse one file of a folder if it is a link out of the folder.

    The author of a checkpoint must not choose which other files of the machine are read. Allowed
    are links within the folder, and links to blobs of the Hugging Face cache
    (`models--ORG--NAME/blobs/HASH`), which make up downloaded snapshots.
    """
    if not path.is_symlink() or not path.is_file():
        return
    target = path.resolve()
    is_cached = target.match("models--*/blobs/*")
    if not is_cached and not target.is_relative_to(path.parent.resolve()):
        raise ModelError(
            f"{path.parent}: {shorten(path.name)} is a link out of the folder, to "
            f"{shorten(str(path.readlink()))}",
            hint="copy or hard-link the file, or name the folder that holds it",
        )
