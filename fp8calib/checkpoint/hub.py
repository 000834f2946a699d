"""Models and scales on the Hub: they are downloaded if they are not on this machine.

If only the scales of a model are needed, only the parts of its weights that are read are
downloaded. Such a file is a sparse file here, which every reader opens. Headers and tensors are
downloaded into their places before they are read: no hole is taken for zeros.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Self

from fp8calib.checkpoint.locations import HUB_FILES, find_local_model, may_be_on_hub, suggest_path
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.output import format_size
from fp8calib.errors import Fp8CalibError, ModelError, first_line, shorten

_NAME = re.compile(r"[^./][^/]*(/[^./][^/]*)?\.json|[^./][^/]*\.safetensors", re.DOTALL)
"""Configs, indexes and weights; of checkpoints in subfolders the configs alone."""
_LARGE_VOCABULARIES = ("tokenizer.json", "vocab.json")
_SIZES = range(2**43)
"""Sizes in bytes that a file may have; no file system here would hold a larger one."""
_BLOCK_BYTES = 2**16
_HEADER_BYTES = 2**17
"""Bytes that are read first: most headers fit."""
_LARGEST_HEADER_BYTES = 100_000_000
"""safetensors refuses a longer one."""
_GAP_BLOCKS = 4
"""Reading this many blocks in between costs less than another request."""
_PIECE_BLOCKS = 128
_THREADS = 8
RANGED_FILES: dict[Path, RangedFile] = {}
"""The files on the Hub that are open, by the path of their copy here."""


def find_folder(
    model: str, revision: str | None = None, *, files: Sequence[str] = HUB_FILES
) -> Path:
    """Return the folder of a model: the path itself, or the download of a hub id.

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
    why, hint = _explain_failure(error)
    message = f"{model} is not a local folder; fetching it from the hub failed: {why}"
    return ModelError(message, hint=f"{suggest_path(Path(model), of_folders=True)}{hint}")


@contextmanager
def open_by_range(
    path: Path,
    revision: str | None = None,
    *,
    reads_all: bool = False,
    say: Callable[[str], None],
) -> Iterator[Path]:
    """Give a folder for a hub id, and download of its weights only what is read.

    With `reads_all` all is downloaded first. A path is given as it is, and for a model that is
    downloaded already its folder. `say` is told how much was read.

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
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(RangedFile.fetch_header, files))
            yield work / path
        except Fp8CalibError as error:
            failure = error
        # also a failure that a reader took for a fault of the file
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


class RangedFile:
    """A file on the Hub, with a sparse copy at a path while the context is open.

    Attributes:
        read_bytes: how much was downloaded.
        failure: the first failure, which every later download raises again.
    """

    def __init__(self, path: Path, model: str, commit: str, size_bytes: int) -> None:
        self.read_bytes = 0
        self.failure: ModelError | None = None
        self._path, self._model, self._commit = path, model, commit
        self._size_bytes = size_bytes
        self._held: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._path.open("xb") as file:
            file.truncate(self._size_bytes)
        RANGED_FILES[self._path] = self
        return self

    def __exit__(self, *_: object) -> None:
        del RANGED_FILES[self._path]

    def fetch_header(self) -> None:
        """Download the header, unless its length is wrong: beyond the file or what is readable."""
        self.fetch([(0, _HEADER_BYTES)])
        with self._path.open("rb") as file:
            stop = 8 + int.from_bytes(file.read(8), "little")
        if stop <= min(self._size_bytes, _LARGEST_HEADER_BYTES):
            self.fetch([(0, stop)])

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Download spans of bytes, cut at the end of the file, unless they are here already."""
        if self.failure is not None:
            raise self.failure
        end = -(-self._size_bytes // _BLOCK_BYTES)
        wanted = {
            block
            for start, stop in spans
            for block in range(start // _BLOCK_BYTES, min(-(-stop // _BLOCK_BYTES), end))
        }
        with self._lock:
            pieces: list[range] = []
            for block in sorted(wanted - self._held):
                last = pieces[-1] if pieces else range(block, block)
                if block - last.stop <= _GAP_BLOCKS and block - last.start < _PIECE_BLOCKS:
                    pieces[-1:] = [range(last.start, block + 1)]
                else:
                    pieces.append(range(block, block + 1))
            if pieces:
                with ThreadPoolExecutor(_THREADS) as pool:
                    sizes = pool.map(self._download, pieces)
                    for piece, size_bytes in zip(pieces, sizes, strict=True):
                        self._held.update(piece)
                        self.read_bytes += size_bytes

    def _download(self, piece: range) -> int:
        """Download some blocks into their places, and give the number of bytes."""
        from huggingface_hub import constants, hf_hub_url  # noqa: PLC0415
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]  # noqa: PLC0415

        start = piece.start * _BLOCK_BYTES
        stop = min(piece.stop * _BLOCK_BYTES, self._size_bytes)
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        data, why, hint = b"", "", ""
        try:
            with http_stream_backoff(
                "GET",
                hf_hub_url(self._model, self._path.name, revision=self._commit),
                headers={**build_hf_headers(), **headers},
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=True,
            ) as response:
                hf_raise_for_status(response)
                sent = response.headers.get("Content-Range", "the whole file")
                if sent != f"bytes {start}-{stop - 1}/{self._size_bytes}":
                    why = f"the hub, or a proxy, sent {shorten(sent)}, not a part of the file"
                else:
                    try:
                        data = response.read()
                    except HTTPError as error:  # one that the context manager would try again with
                        why = f"reading it from the hub failed: {error}"
            if not why and len(data) != stop - start:
                why = f"the hub sent {len(data)} bytes, not {stop - start}"
            if not why:
                with self._path.open("r+b") as file:
                    file.seek(start)
                    file.write(data)
        except HTTPError as error:
            why, hint = _explain_failure(error)
            why = f"reading it from the hub failed: {why}"
        except OSError as error:  # of the disk
            why = f"cannot be written: {error.strerror}"
            hint = "free some space, or name another folder by TMPDIR"
        if why:
            hint = hint or f"`hf download {self._model}`, and pass the folder that it names"
            self.failure = ModelError(f"{self._path}: {why}", hint=hint)
            raise self.failure
        return len(data)


def _explain_failure(error: Exception) -> tuple[str, str]:
    """Say why the Hub gives nothing, and what helps."""
    why = first_line(error)
    if why.endswith(":"):
        why = " ".join(str(error).split("\n")[:2])
    status = getattr(getattr(error, "response", None), "status_code", None)
    hint = "check the name and the network, or pass a local folder"
    if status in (401, 403):
        hint = "check the name; `hf auth login` or HF_TOKEN opens what is private or gated"
    elif status == 429:
        hint = "wait five minutes; the hub counts requests, more are free with `hf auth login`"
    return why, hint
