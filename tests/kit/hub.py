"""A Hub on this machine: the parts of its HTTP API that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c" * 40


@dataclass
class FakeHub:
    """What the Hub holds, and what it was asked."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    breaks: str = ""
    """A file whose first download ends in the middle."""

    def respond(self, method: str, path: str) -> tuple[int, Any]:
        """Answer a request: a status, and JSON or bytes."""
        self.asked.append(f"{method} {path}")
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
            "siblings": [{"rfilename": name} for name in files],
        }


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()  # noqa: S324 -- as git does


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Serve an empty Hub."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = urlsplit(self.path).path
            status, found = hub.respond(self.command, path)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            if isinstance(found, bytes):
                self.send_header("ETag", f'"{_sha1(data)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Type", "application/octet-stream")
            else:
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.breaks and path.endswith(hub.breaks):
                hub.breaks, data = "", data[: len(data) // 2]
                self.close_connection = True
            self.wfile.write(data)

        do_GET = do_HEAD = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
