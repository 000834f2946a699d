"""HTTP requests to a server: limited in number and in time, repeated where the server is busy.

An API key is read from the environment. No message holds it, whatever the server answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from fp8calib import __version__
from fp8calib.errors import ServerError, UsageError, first_line, shorten

try:
    import httpx
except ModuleNotFoundError as error:
    raise UsageError(
        "fp8calib server needs httpx", hint='run `pip install "fp8calib[server]"`'
    ) from error

T = TypeVar("T")
_BUSY = frozenset({408, 429, 502, 503, 504})
_SAID_S = 30.0
"""The shortest time between two notes on requests that are sent again."""
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_CONNECT_S = 10.0
"""The longest wait for a connection, TLS included; then another is tried."""
_ATTEMPTS = 2
"""How often a request is sent, at least, within the time-out."""
_LAST_PART = 8
"""The last request is sent when this part of the time-out is left, or later."""
_LARGEST_BYTES = 2**28
_BROKEN_CONNECTIONS = 3
"""Requests that fail without an answer before a server counts as gone."""
_SHOWN = 300
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
_LEAST_KEY = 8
"""A shorter key is a placeholder such as `none`, which any message may hold."""
_HINT_BUSY = (
    "wait until it is free, raise --server-timeout, or lower --server-concurrency; behind a proxy, "
    "is the server running?"
)
_HINT_BROKEN = (
    "is the server running, and is the URL right? its log may name the cause; SSL_CERT_FILE names "
    "the certificate of its authority"
)
_HINT_LATE = "raise --server-timeout, or lower --server-concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a server answered."""

    status: int
    body: Any
    """The JSON value; None where the answer is not JSON."""
    text: str
    """The beginning of the answer, on one line."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, in another thread where a loop runs in this one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@cache
def _read_certificates(*_places: str | None) -> ssl.SSLContext:
    """Read the certificates that the environment names once: that takes longer than a request."""
    return httpx.create_ssl_context()


class ServerClient:
    """Sends requests to one server; each ends within a time-out, repetitions included."""

    def __init__(self, option: str, url: str, variable: str, say: Callable[[str], None]) -> None:
        """Check the URL, and read the API key from the environment.

        `option` is the argument or option that gives the URL, for messages, and `variable` the
        environment variable of the key. `say` gets notes on requests that are sent again.

        Raises:
            UsageError: the URL is not that of a server or holds a password, or the key cannot be
                sent.
        """
        try:
            parsed = httpx.URL(url)
            is_url = parsed.scheme in {"http", "https"} and bool(parsed.host)
            is_url = is_url and not (parsed.userinfo or parsed.query or parsed.fragment)
            is_url = is_url and (parsed.port is None or 0 < parsed.port < 2**16)
        except (httpx.InvalidURL, ValueError):
            is_url = False
        if not is_url:  # it may hold a password, so the message does not
            raise UsageError(
                f"{option}: not the http or https URL of a server",
                hint=f"write it like http://localhost:8000; {variable} holds the API key",
            )
        path = parsed.path.rstrip("/").removesuffix("/v1")
        self.url = str(parsed.copy_with(raw_path=path.encode() or b"/")).rstrip("/")
        self.option = option
        self.model_option = "--server-model" if option == "URL" else f"{option}-model"
        self.repeated = 0
        """How many requests were sent again."""
        self._variable, self._say, self._say_at = variable, say, -math.inf
        self._key = os.environ.get(variable, "").strip()
        if not self._key.isascii() or not self._key.isprintable() or " " in self._key:
            raise UsageError(
                f"{variable}: the key cannot be sent in a header",
                hint="use printable ASCII characters",
            )

    @asynccontextmanager
    async def connected(self, timeout_s: float, concurrency: int) -> AsyncIterator[None]:
        """Allow requests: at most so many at once, and so many seconds for each."""
        headers = {"User-Agent": f"fp8calib/{__version__}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),  # `_request` limits the whole
                limits=httpx.Limits(max_connections=concurrency),
                verify=_read_certificates(*map(os.environ.get, _CERTIFICATES)),
            )
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            raise UsageError(
                f"{self.option}: httpx cannot use the certificates or the proxies that the "
                f"environment names: {first_line(error)}",
                hint="look at SSL_CERT_FILE, SSLKEYLOGFILE, and the variables that end with _PROXY",
            ) from error
        self._client, self._timeout_s = client, timeout_s
        async with client:
            yield

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Response:
        """Send a document; without one, ask for one.

        Raises:
            ServerError: no answer within the time-out, the server is busy until then, it is
                gone, or it refuses the key.
        """
        until = time.monotonic() + self._timeout_s
        delay, broken = _FIRST_DELAY_S, 0
        while True:
            pause, hint = 0.0, _HINT_BUSY
            left = until - time.monotonic()
            limit = min(left, self._timeout_s / _ATTEMPTS)
            try:
                async with asyncio.timeout(limit):
                    answer, pause = await self._attempt(path, body)
                if answer.status not in _BUSY:
                    return self._checked(path, answer)
                why = f"answers {answer.status}: {answer.text}"
            except TimeoutError as error:
                why, hint = f"no answer within {self._timeout_s:g} s", _HINT_LATE
                if limit == left:
                    raise self._fail(f"{path}: {why}", hint) from error
                delay = min(delay, limit / 4)  # most of what is left is for the answer
            except (httpx.TransportError, httpx.DecodingError) as error:
                broken += 1
                why, hint = _explain_broken(error), _HINT_BROKEN
                if broken == _BROKEN_CONNECTIONS:
                    raise self._fail(f"{path}: {why}", hint) from error
            pause = min(max(delay, pause), _LONGEST_DELAY_S) * random.uniform(0.8, 1.2)  # noqa: S311
            delay *= 2
            rest = until - self._timeout_s / _LAST_PART - time.monotonic()
            if rest <= 0:
                raise self._fail(f"{path}: {why}, for {self._timeout_s:g} s", hint)
            self.repeated += 1
            if time.monotonic() >= self._say_at:
                self._say_at = time.monotonic() + _SAID_S
                self._say(f"{self.url}{path}: {why}; asking again")
            await asyncio.sleep(min(pause, rest))  # it may be free before the time that it names

    async def _attempt(self, path: str, body: Mapping[str, Any] | None) -> tuple[Response, float]:
        """Send a request once; give the answer, and the seconds that a busy server asks for."""
        method = "GET" if body is None else "POST"
        async with self._client.stream(method, self.url + path, json=body) as response:
            raw = bytearray()
            async for chunk in response.aiter_bytes():
                raw += chunk
                if len(raw) > _LARGEST_BYTES:
                    raise self._fail(
                        f"{path}: the answer is longer than {_LARGEST_BYTES // 2**20} MiB",
                        "use a smaller --server-logprobs or --seq-len",
                    )
        wait = response.headers.get("retry-after", "")
        return self._read(response, bytes(raw)), float(wait) if wait.isdecimal() else 0.0

    def _read(self, response: httpx.Response, raw: bytes) -> Response:
        """Read an answer without the key, which it may repeat anywhere."""
        if len(self._key) >= _LEAST_KEY:
            raw = raw.replace(self._key.encode(), b"***")
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        text = _find_message(body) or raw[: 8 * _SHOWN].decode("utf-8", "replace")
        if body is None:
            text = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
        if response.has_redirect_location:
            text = f"a redirection to {httpx.URL(response.headers['location']).host or 'a path'}"
        return Response(status=response.status_code, body=body, text=_shorten(text) or "nothing")

    def _checked(self, path: str, answer: Response) -> Response:
        if answer.status in {401, 403}:
            given = "refuses the key of" if self._key else "asks for a key, expected in"
            raise self._fail(
                f"{path}: the server {given} {self._variable} ({answer.status}: {answer.text})",
                f"set the environment variable {self._variable}",
            )
        if httpx.codes.is_redirect(answer.status):
            raise self._fail(f"{path}: {answer.text}", "give the URL it is redirected to")
        return answer

    def _fail(self, what: str, hint: str) -> ServerError:
        return ServerError(f"{self.url}{what}", hint=hint)


def _explain_broken(error: httpx.RequestError) -> str:
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {_CONNECT_S:g} s"
    what = "the connection broke"
    if isinstance(error, httpx.ConnectError):
        what = "no connection"
    elif isinstance(error, httpx.DecodingError):
        what = "the answer cannot be decompressed"
    return f"{what}: {_shorten(first_line(error))}"


def _shorten(text: str) -> str:
    return shorten(" ".join(text.split())[:_SHOWN])


def _find_message(body: Any) -> str:
    """Find the message of an error in the forms that vLLM, SGLang and proxies use."""
    if not isinstance(body, dict):
        return ""
    found = body.get("error", body.get("message", body.get("detail", "")))
    if isinstance(found, dict):
        found = found.get("message", "")
    return found if isinstance(found, str) else json.dumps(found)
