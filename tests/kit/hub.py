"""A Hub on this machine: the parts of its HTTP API that downloads use."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c" * 40


@dataclass
class Answer:
    """What the Hub answers where a part of a file is asked."""

    status: int
    headers: dict[str, str]
    data: bytes
    pause_s: float = 0.0


@dataclass
class FakeHub:
    """What the Hub holds, and what it was asked."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    change: Callable[[Answer], None] | None = None
    """What is wrong with the answers that give a part of a file."""
    sent_bytes: int = 0
    """How much of files was sent."""
    has_sizes: bool = True
    fails: int = 0
    """The status of every answer, if it is not 0."""
    tokens: list[str] = field(default_factory=list)
    """The tokens that came with requests for parts."""

    def respond(self, method: str, path: str) -> tuple[int, Any]:
        """Answer a request: a status, and JSON or bytes."""
        self.asked.append(f"{method} {path}")
        if self.fails:
            return self.fails, {"error": "no"}
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._of_model("/".join(parts[2:4]), parts[4:])
        if len(parts) > 3 and parts[2] == "resolve":
            files = self.repos.get("/".join(parts[:2]), {})
            name = "/".join(parts[4:])
            return (200, files[name]) if name in files else (404, {"error": "Entry not found"})
        return 404, {"error": f"not there: {path}"}

    def _of_model(self, repo: str, rest: list[str]) -> tuple[int, Any]:
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        files = self.repos[repo]
        if rest[:1] == ["tree"]:
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": _sha1(data)}
                for name, data in files.items()
            ]
        return 200, {
            "id": repo,
            "sha": COMMIT,
            "siblings": [
                {"rfilename": name} | ({"size": len(data)} if self.has_sizes else {})
                for name, data in files.items()
            ],
        }


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()  # noqa: S324 -- as git does


def _cut(answer: Answer, wanted: str) -> None:
    """Cut the part of a file that is asked: `bytes=START-STOP`."""
    size = len(answer.data)
    first, last = (int(each or size - 1) for each in wanted.removeprefix("bytes=").split("-"))
    answer.status, answer.data = 206, answer.data[first : last + 1]
    answer.headers["Content-Range"] = f"bytes {first}-{first + len(answer.data) - 1}/{size}"


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = urlsplit(self.path).path
            status, found = hub.respond(self.command, path)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            headers = {"Content-Type": "application/json"}
            if isinstance(found, bytes):
                headers = {"ETag": f'"{_sha1(data)}"', "X-Repo-Commit": COMMIT}
                headers["Content-Type"] = "application/octet-stream"
            answer = Answer(status, headers, data)
            if "Range" in self.headers and isinstance(found, bytes):
                _cut(answer, self.headers["Range"])
                hub.tokens.append(self.headers.get("Authorization", ""))
                if hub.change is not None:
                    hub.change(answer)
            time.sleep(answer.pause_s)
            self.send_response(answer.status)
            for key, value in ({"Content-Length": str(len(answer.data))} | answer.headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if isinstance(found, bytes):
                hub.sent_bytes += len(answer.data)
            with suppress(BrokenPipeError, ConnectionResetError):  # the reader has seen enough
                self.wfile.write(answer.data)

        do_GET = do_HEAD = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
