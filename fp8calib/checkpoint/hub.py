"""Models and scales on the Hub: they are downloaded, where they are not on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from fp8calib.checkpoint.disk import format_size
from fp8calib.checkpoint.locations import HUB_FILES, find_local_model, may_be_on_hub, suggest_path
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.ranges import RangedFile, explain_failure
from fp8calib.errors import Fp8CalibError, ModelError

_NAME = re.compile(r"[^./][^/]*(/[^./][^/]*)?\.json|[^./][^/]*\.safetensors", re.DOTALL)
"""Configs, indexes and weights; of checkpoints in subfolders the configs alone."""
_LARGE_VOCABULARIES = ("tokenizer.json", "vocab.json")
_SIZES = range(2**43)
"""What a file may have; a larger one would not be a file here either."""


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
        raise _refuse(model, error) from error


def _refuse(model: str, error: Exception) -> ModelError:
    why, hint = explain_failure(error)
    message = f"{model} is not a local folder; fetching it from the hub failed: {why}"
    return ModelError(message, hint=f"{suggest_path(Path(model), of_folders=True)}{hint}")


def fetch_hub_id(path: Path) -> Path:
    """Download a checkpoint or its scales if `path` is a hub id; else return the path itself.

    Raises:
        ModelError: the hub has no such repository, or cannot be reached.
    """
    return find_folder(str(path)) if may_be_on_hub(path) else path


@contextmanager
def open_by_range(
    path: Path,
    revision: str | None = None,
    *,
    reads_all: bool = False,
    say: Callable[[str], None],
) -> Iterator[Path]:
    """Give a folder for a hub id of whose weights only what is read is downloaded.

    With `reads_all` all is downloaded first. A path is given itself, and so is the folder of a
    model that is downloaded already. `say` is told how much was read.

    Raises:
        ModelError: the hub has no such repository, or gives something else than was asked for.
    """
    if not may_be_on_hub(path):
        yield path
        return
    model = str(path)
    found = (find_folder if reads_all else _find_parts)(model, revision)
    if isinstance(found, Path):
        yield found
        return
    commit, sizes = found
    small = [name for name in sizes if name.endswith(".json")]
    copied = find_folder(model, commit, files=small)
    with ExitStack() as stack:
        # resolved: files are found by their paths
        work = Path(stack.enter_context(TemporaryDirectory(prefix="fp8calib-"))).resolve()
        for name in small:
            (work / path / name).parent.mkdir(parents=True, exist_ok=True)
            copyfile(copied / name, work / path / name)
        files = [
            stack.enter_context(RangedFile(work / path / name, model, commit, size_bytes))
            for name, size_bytes in sizes.items()
            if name not in small
        ]
        failure: Fp8CalibError | None = None
        try:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(RangedFile.fetch_header, files))
            yield work / path
        except Fp8CalibError as error:
            failure = error
        # also one that a reader took for a fault of the file
        failure = next((file.failure for file in files if file.failure), failure)
        if failure is not None:
            failure.message = failure.message.replace(f"{work}/", "")
            failure.args = (failure.message,)
            raise failure
        read = sum(sizes[name] for name in small) + sum(file.read_bytes for file in files)
        say(f"{model}: read {format_size(read)} of {format_size(sum(sizes.values()))}")


def _find_parts(model: str, revision: str | None) -> Path | tuple[str, dict[str, int]]:
    """Find the folder of a model if it is downloaded; else the commit, and the sizes of files."""
    from huggingface_hub import HfApi, constants  # noqa: PLC0415
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

    try:
        info = HfApi().model_info(
            model, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except (HTTPError, OSError, ValueError) as error:
        folder = _find_downloaded(model, revision)
        # an earlier reading by range leaves configs without weights
        if folder and (any(folder.glob("*.safetensors")) or not (folder / CONFIG_NAME).exists()):
            return folder
        raise _refuse(model, error) from error
    needed = {e.rfilename: e.size for e in info.siblings or () if _NAME.fullmatch(e.rfilename)}
    for name in _LARGE_VOCABULARIES:
        needed.pop(name, None)
    folder = _find_downloaded(model, info.sha)
    if folder and all((folder / name).is_file() for name in needed):
        return folder
    if not any(name.endswith(".safetensors") for name in needed):
        return find_folder(model, info.sha)
    sizes = {n: size for n, size in needed.items() if size is not None and size in _SIZES}
    if info.sha is None or len(sizes) < len(needed):
        hint = f"`hf download {model}`, and pass the folder that it names"
        raise ModelError(f"{model}: the hub does not say how large its files are", hint=hint)
    return info.sha, sizes


def _find_downloaded(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
