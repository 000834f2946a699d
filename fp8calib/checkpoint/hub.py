"""Models and scales on the Hub: they are downloaded, where they are not on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8calib.checkpoint.locations import HUB_FILES, find_local_model, may_be_on_hub, suggest_path
from fp8calib.errors import ModelError, first_line


def find_folder(
    model: str, revision: str | None = None, *, files: Sequence[str] = HUB_FILES
) -> Path:
    """Return the folder of a model: the path itself, or a hub id's download, which is made first.

    Args:
        model: a folder or hub id.
        revision: branch, tag or commit on the hub.
        files: patterns of the files to download; the folder may hold others from earlier.

    Raises:
        ModelError: there is no such folder, or the download failed.
    """
    if folder := find_local_model(model):
        return folder
    # slow to import, and needed by few
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    from tqdm.auto import tqdm  # noqa: PLC0415

    class DownloadBar(tqdm):  # type: ignore[misc]
        """The bar of a download, in a terminal alone; the libraries' other bars stay off."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": None, "leave": False})

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=list(files), tqdm_class=DownloadBar
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = first_line(error)
        if why.endswith(":"):
            why = " ".join(str(error).split("\n")[:2])
        near = suggest_path(Path(model))
        raise ModelError(
            f"{model} is not a local folder; fetching it from the hub failed: {why}",
            hint=f"{near}check the name and the network, or pass a local folder",
        ) from error


def fetch_hub_id(path: Path) -> Path:
    """Download a checkpoint or its scales if `path` is a hub id; else return the path itself.

    Raises:
        ModelError: the hub has no such repository, or cannot be reached.
    """
    return find_folder(str(path)) if may_be_on_hub(path) else path
