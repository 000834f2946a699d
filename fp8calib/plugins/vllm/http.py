"""Two requests to a running vLLM, with an API key from the environment."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fp8calib.errors import ServerError, UsageError, first_line, shorten

KEY = "FP8CALIB_SERVER_KEY"
_TIMEOUT_S = 60.0
_SHOWN = 300


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, str]:
    """GET a document, or POST one; give the status, the JSON value (or None), and a line of text.

    No message holds the key, whatever the server answers.

    Raises:
        UsageError: the URL is not one of http or https.
        ServerError: there is no answer.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")) or "@" in base:
        hint = f"write it like http://localhost:8000; {KEY} holds the API key"
        raise UsageError("--url: not the http or https URL of a server", hint=hint)
    key = os.environ.get(KEY, "").strip()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(base + path, data, headers), timeout=_TIMEOUT_S) as answer:  # noqa: S310 -- checked above
            status, raw = answer.status, answer.read()
    except HTTPError as error:
        status, raw = error.code, error.read()
    except (OSError, ValueError) as error:  # also of broken HTTP
        why = first_line(error).replace(key or "\0", "***")
        raise ServerError(
            f"{base}{path}: no connection: {why}", hint="is the server running, at this URL?"
        ) from error
    text = raw.decode("utf-8", "replace").replace(key or "\0", "***")
    try:
        return status, json.loads(raw), shorten(" ".join(text.split())[:_SHOWN])
    except ValueError:
        return status, None, shorten(" ".join(text.split())[:_SHOWN])
