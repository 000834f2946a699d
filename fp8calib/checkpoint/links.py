"""Links in a checkpoint folder that was given to us: which are followed, which are refused."""

from __future__ import annotations

from pathlib import Path

from fp8calib.errors import ModelError, shorten

_READ_SUFFIXES = (".json", ".safetensors", ".npz")
_BLOBS = "blobs"
_CACHED_MODEL = "models--"


def refuse_external_links(folder: Path) -> None:
    """Refuse a folder in which a file that is read is a link to one elsewhere.

    Whoever sends a checkpoint must not choose what else is read on the machine. Links within the
    folder are followed, and so are those to a blob of the Hugging Face cache
    (`models--ORG--NAME/blobs/HASH`), which is how a downloaded snapshot is made. The folder itself
    may be a link: the user named it.

    Raises:
        ModelError: naming the link.
        OSError: the folder cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ_SUFFIXES:
            refuse_external_link(path)


def refuse_external_link(path: Path) -> None:
    """Refuse one file of a folder where it is such a link.

    Raises:
        ModelError: naming the link.
    """
    if path.is_symlink() and path.is_file() and not _may_be_followed(path):
        target = shorten(str(path.readlink()))
        raise ModelError(
            f"{path.parent}: {shorten(path.name)} is a link out of the folder, to {target}",
            hint="copy or hard-link the file, or name the folder it lies in",
        )


def _may_be_followed(path: Path) -> bool:
    target = path.resolve()
    blobs = target.parent
    is_cached = blobs.name == _BLOBS and blobs.parent.name.startswith(_CACHED_MODEL)
    return is_cached or target.is_relative_to(path.parent.resolve())
