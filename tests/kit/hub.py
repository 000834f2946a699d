"""A Hub on this machine: the parts of its HTTP API that uploads and downloads use."""

from __future__ import annotations

import base64
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
    token: str = "hf_of_this_test"  # noqa: S105 -- no secret
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Uploaded LFS objects, by SHA-256."""
    breaks: str = ""
    """A file whose first download ends in the middle."""

    def respond(  # noqa: PLR0911 -- an answer a route
        self, method: str, path: str, body: bytes, token: str
    ) -> tuple[int, Any]:
        """Answer a request: a status, and JSON or bytes."""
        self.asked.append(f"{method} {path}")
        parts = path.strip("/").split("/")
        if method in ("POST", "PUT") and not path.startswith("/lfs/") and token != self.token:
            return 401, {"error": "Invalid user token."}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in self.repos:
                return 409, {"error": "exists", "url": f"{self.url}/{name}"}
            self.repos[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.private.add(name)
            return 200, {"url": f"{self.url}/{name}", "id": name, "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/lfs/"):
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.large[parts[1]] = body
            return 200, {}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [
                    {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}
                    for each in json.loads(body)["objects"]
                ],
            }
        if parts[:2] == ["api", "models"]:
            return self._of_model("/".join(parts[2:4]), parts[4:], body)
        if len(parts) > 3 and parts[2] == "resolve":
            files = self.repos.get("/".join(parts[:2]), {})
            name = "/".join(parts[4:])
            return (200, files[name]) if name in files else (404, {"error": "Entry not found"})
        return 404, {"error": f"not there: {path}"}

    def _of_model(self, repo: str, rest: list[str], body: bytes) -> tuple[int, Any]:
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        files = self.repos[repo]
        if rest[:1] == ["preupload"]:
            asked = json.loads(body)["files"]
            return 200, {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for each in asked
                ]
            }
        if rest[:1] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.large[value["oid"]]
            return 200, {"commitOid": COMMIT, "commitUrl": f"{self.url}/{repo}/commit/{COMMIT}"}
        if rest[:1] == ["tree"]:
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": _sha1(data)}
                for name, data in files.items()
            ]
        return 200, {
            "id": repo,
            "sha": COMMIT,
            "private": repo in self.private,
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
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            path = urlsplit(self.path).path
            status, found = hub.respond(self.command, path, body, token)
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

        do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815

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
