"""Refuse symbolic links that lead out of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from fp8calib.errors import ModelError, shorten

_READ_SUFFIXES = (".json", ".safetensors", ".npz")


def refuse_external_links(folder: Path) -> None:
    """Refuse a folder if a file to be read is a link to a file outside it.

    The folder itself may be a link, because the user named it.

    Raises:
        ModelError: a file is such a link.
        OSError: the folder cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ_SUFFIXES:
            refuse_external_link(path)


def refuse_external_link(path: Path) -> None:
    """Refuse one file of a folder if it is a link out of the folder.

    The author of a checkpoint must not choose which other files of the machine are read. Allowed
    are links within the folder, and links to blobs of the Hugging Face cache
    (`models--ORG--NAME/blobs/HASH`), which make up downloaded snapshots.

    Raises:
        ModelError: the file is such a link.
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
