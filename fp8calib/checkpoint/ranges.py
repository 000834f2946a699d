"""Files on the Hub of which only the parts that are read are downloaded.

Such a file is here as a file of holes, which every reader opens. Headers and tensors are downloaded
into their places before they are read: no hole is taken for zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from fp8calib.errors import ModelError, first_line, shorten

_BLOCK_BYTES = 2**16
_HEADER_BYTES = 2**17
"""What is read first: most headers fit."""
_LARGEST_HEADER_BYTES = 100_000_000
"""safetensors refuses a longer one."""
_GAP_BLOCKS = 4
"""So many blocks more cost less than another request."""
_PIECE_BLOCKS = 128
_THREADS = 8
_FILES: dict[str, RangedFile] = {}
"""Those that are open, by path."""


class RangedFile:
    """A file on the Hub; while the context is open, readers of the path get what they read.

    Attributes:
        read_bytes: how much was downloaded.
        failure: the first that there was, which is raised again by every later reading.
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
        _FILES[str(self._path)] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _FILES[str(self._path)]

    def fetch_header(self) -> None:
        """Download the header, unless it is longer than the file, or than any that is read."""
        self.fetch([(0, _HEADER_BYTES)])
        with self._path.open("rb") as file:
            stop = 8 + int.from_bytes(file.read(8), "little")
        if stop <= min(self._size_bytes, _LARGEST_HEADER_BYTES):
            self.fetch([(0, stop)])

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Download what is not here yet of some spans of bytes, as far as the file has them.

        Raises:
            ModelError: the hub does not give it, or gives something else.
        """
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
                    for piece, size_bytes in zip(pieces, pool.map(self._read, pieces), strict=True):
                        self._held.update(piece)
                        self.read_bytes += size_bytes

    def _read(self, piece: range) -> int:
        """Download some blocks, and give their bytes."""
        from huggingface_hub import constants, hf_hub_url  # noqa: PLC0415
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        start = piece.start * _BLOCK_BYTES
        stop = min(piece.stop * _BLOCK_BYTES, self._size_bytes)
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
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
                    raise self._fail(why)
                try:
                    data = response.read()
                except HTTPError as error:  # one that the context manager would try again with
                    raise self._fail(f"reading it from the hub failed: {error}") from error
            if len(data) != stop - start:
                raise self._fail(f"the hub sent {len(data)} bytes, not {stop - start}")
            with self._path.open("r+b") as file:
                file.seek(start)
                file.write(data)
        except HTTPError as error:
            why, hint = explain_failure(error)
            raise self._fail(f"reading it from the hub failed: {why}", hint) from error
        except OSError as error:  # of the disk
            hint = "free some space, or name another folder by TMPDIR"
            raise self._fail(f"cannot be written: {error.strerror}", hint) from error
        return len(data)

    def _fail(self, why: str, hint: str = "") -> ModelError:
        hint = hint or f"`hf download {self._model}`, and pass the folder that it names"
        self.failure = ModelError(f"{self._path}: {why}", hint=hint)
        return self.failure


def find_ranged_file(path: Path) -> RangedFile | None:
    """Find the file on the Hub that is open under a path; None for others."""
    return _FILES.get(str(path))


def explain_failure(error: Exception) -> tuple[str, str]:
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
