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
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Self, TypeVar

from fp8calib import __version__
from fp8calib.errors import Fp8CalibError, ServerError, UsageError, first_line, shorten

try:
    import httpx
except ModuleNotFoundError as error:
    raise UsageError(
        "fp8calib server needs httpx", hint='run `pip install "fp8calib[server]"`'
    ) from error

T = TypeVar("T")
_BUSY = frozenset({408, 429, 502, 503, 504})
_GATEWAY = 502
_GATEWAY_S = 30.0
"""A proxy that answers so for longer has no server behind it."""
_SAID_S = 30.0
"""The shortest time between two notes on requests that are sent again."""
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_CONNECT_S = 10.0
"""The longest wait for a connection, TLS included; then another is tried."""
_RESOLVE_S = 8.0
"""The longest wait for the address of a host, a part of it."""
_ATTEMPTS = 2
"""How often a request is sent, at least, within the time-out."""
_LAST_PART = 8
"""The last request is sent when this part of the time-out is left, or later."""
_LARGEST_BYTES = 2**28
_BROKEN_CONNECTIONS = 3
"""Requests that fail without an answer before a server counts as gone."""
_SHOWN = 300
_LEAST_KEY = 8
"""A shorter key is a placeholder such as `none`, which any message may hold."""
_HINT_BUSY = "wait until it is free, raise --server-timeout, or lower --server-concurrency"
_HINT_GATEWAY = "a proxy answers, and no server behind it: is the server running?"
_HINT_TLS = "set SSL_CERT_FILE to the certificate of the server's authority, or check the URL"
_HINT_BROKEN = "is the server running, and is the URL right? its log may name the cause"
_HINT_LATE = "raise --server-timeout, or lower --server-concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server is, and what it asks for."""

    url: str
    """Without the path of an API, and without a slash at the end."""
    option: str
    """The argument or option that names it, for messages: `URL` or `--reference-server`."""
    variable: str
    """The environment variable that holds its API key."""
    key: str = field(default="", repr=False)

    @property
    def model_option(self) -> str:
        """The option that names the model there."""
        return "--server-model" if self.option == "URL" else f"{self.option}-model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a server answered."""

    status: int
    body: Any
    """The JSON value; None where the answer is not JSON."""
    text: str
    """The beginning of the answer, on one line."""

    @property
    def is_ok(self) -> bool:
        """Whether the server did what was asked."""
        return self.status == httpx.codes.OK


def find_endpoint(option: str, url: str, variable: str) -> Endpoint:
    """Check the URL of a server, and read its API key from the environment.

    Raises:
        UsageError: the URL is not that of a server or holds a password, or the key cannot be sent.
    """
    hint = "give it like http://localhost:8000"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"{option}: not a URL: {first_line(error)}", hint=hint) from error
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise UsageError(f"{option}: not a URL: port {parsed.port} is not 1 to 65535", hint=hint)
    if parsed.userinfo:
        raise UsageError(
            f"{option}: the URL holds a user name or a password",
            hint=f"put the key into the environment variable {variable}",
        )
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise UsageError(f"{option} {shorten(url)}: not a http or https URL", hint=hint)
    if parsed.query or parsed.fragment:
        raise UsageError(f"{option} {parsed.host}: the URL ends with a query", hint=hint)
    path = parsed.path.rstrip("/").removesuffix("/v1")
    base = str(parsed.copy_with(raw_path=path.encode() or b"/")).rstrip("/")
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{variable}: the key cannot be sent in a header", hint="use printable ASCII characters"
        )
    return Endpoint(url=base, option=option, variable=variable, key=key)


@contextmanager
def hidden_key(endpoint: Endpoint) -> Iterator[None]:
    """Take the key out of the messages of errors: they may quote any part of an answer."""
    try:
        yield
    except Fp8CalibError as error:
        if len(endpoint.key) >= _LEAST_KEY:
            error.message = error.message.replace(endpoint.key, "***")
            error.hint = error.hint.replace(endpoint.key, "***")
            error.args = (error.message,)
        raise


@dataclass(slots=True)
class RequestCount:
    """The requests of a run to one server."""

    say: Callable[[str], None]
    """Gets a note on requests that are sent again."""
    repeated: int = 0
    """How many they are."""
    _say_at: float = -math.inf

    def repeat(self, why: str) -> None:
        """Count a request that is sent again, and say why, at intervals."""
        self.repeated += 1
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + _SAID_S
            self.say(f"{why}; asking again")


class ServerLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for a slow resolver, not even when it closes.

    asyncio resolves names in threads that it joins when the loop closes. These threads are not
    joined.
    """

    async def getaddrinfo(
        self, host: bytes | str | None, port: bytes | str | int | None, **options: int
    ) -> Any:
        """Find the addresses of a host.

        Raises:
            OSError: there is none, or none is found in time.
        """
        found: Future[Any] = Future()
        found.set_running_or_notify_cancel()  # the thread may set a result that nobody waits for

        def resolve() -> None:
            try:
                found.set_result(socket.getaddrinfo(host, port, **options))
            except (OSError, UnicodeError) as error:
                found.set_exception(error)

        Thread(target=resolve, daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(found), _RESOLVE_S)
        except TimeoutError as error:
            name = host.decode() if isinstance(host, bytes) else host
            raise OSError(f"the address of {name} was not found within {_RESOLVE_S:g} s") from error


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, in another thread where a loop runs in this one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_run_here, work).result()


def _run_here(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        return runner.run(work)


class ServerClient:
    """Sends requests to one server; each ends within `timeout_s`, repetitions included."""

    def __init__(
        self, endpoint: Endpoint, timeout_s: float, concurrency: int, count: RequestCount
    ) -> None:
        """Make the client; it connects later.

        Raises:
            UsageError: the environment names certificates or proxies that cannot be used.
        """
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._count = count
        headers = {"User-Agent": f"fp8calib/{__version__}"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        try:
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),  # `_request` limits the whole
                limits=httpx.Limits(max_connections=concurrency),
            )
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            raise UsageError(
                f"{endpoint.option}: httpx cannot use the certificates or the proxies that the "
                f"environment names: {first_line(error)}",
                hint="look at SSL_CERT_FILE, SSLKEYLOGFILE, and the variables that end with _PROXY",
            ) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Response:
        """Ask for a document."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Response:
        """Send a document.

        Raises:
            ServerError: no answer within the time-out, the server is busy until then, it is
                gone, or it refuses the key.
        """
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Response:
        until = time.monotonic() + self._timeout_s
        without_server: float | None = None  # since when
        delay, broken = _FIRST_DELAY_S, 0
        while True:
            wait: float | None = None
            hint = _HINT_BUSY
            left = until - time.monotonic()
            limit = min(left, self._timeout_s / _ATTEMPTS)
            try:
                async with asyncio.timeout(limit):
                    answer, wait = await self._attempt(method, path, body)
                why = f"answers {answer.status}: {answer.text}"
            except TimeoutError as error:
                if limit == left:
                    why = f"{path}: no answer within {self._timeout_s:g} s"
                    raise self._fail(why, _HINT_LATE) from error
                why, hint = "no answer", _HINT_LATE
                delay = min(delay, limit / 4)  # most of what is left is for the answer
            except (httpx.TransportError, httpx.DecodingError) as error:
                broken += 1
                tls = _find_tls(error)
                why, hint = self._explain_broken(error, tls), _HINT_TLS if tls else _HINT_BROKEN
                if broken == _BROKEN_CONNECTIONS or tls:
                    raise self._fail(f"{path}: {why}", hint) from error
            else:
                if answer.status not in _BUSY:
                    return self._checked(path, answer)
                if answer.status == _GATEWAY:
                    now = time.monotonic()
                    without_server = without_server or now
                    if now - without_server > _GATEWAY_S:
                        raise self._fail(f"{path}: {why}, for {_GATEWAY_S:g} s", _HINT_GATEWAY)
            pause = min(max(delay, wait or 0.0), _LONGEST_DELAY_S) * random.uniform(0.8, 1.2)  # noqa: S311
            delay *= 2
            rest = until - self._timeout_s / _LAST_PART - time.monotonic()
            if rest <= 0:
                raise self._fail(f"{path}: {why}, for {self._timeout_s:g} s", hint)
            pause = min(pause, rest)  # a server may be free before the time that it names
            self._count.repeat(f"{self.endpoint.url}{path}: {why}")
            await asyncio.sleep(pause)

    async def _attempt(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[Response, float | None]:
        """Send a request once; give the answer, and the seconds that a busy server asks for."""
        async with self._client.stream(method, self.endpoint.url + path, json=body) as response:
            raw = bytearray()
            async for chunk in response.aiter_bytes():
                raw += chunk
                if len(raw) > _LARGEST_BYTES:
                    raise self._fail(
                        f"{path}: the answer is longer than {_LARGEST_BYTES // 2**20} MiB",
                        "use a smaller --server-logprobs or --seq-len",
                    )
            return self._read(response, bytes(raw)), _read_delay(response)

    def _read(self, response: httpx.Response, raw: bytes) -> Response:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        text = _find_message(body) or raw[: 8 * _SHOWN].decode("utf-8", "replace")
        if body is None:
            text = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
        if response.has_redirect_location:
            text = f"a redirection to {httpx.URL(response.headers['location']).host or 'a path'}"
        return Response(status=response.status_code, body=body, text=self._clean(text))

    def _clean(self, text: str) -> str:
        """Shorten a text of the server to one line without the key, which it may repeat."""
        line = " ".join(text.split())
        if self.endpoint.key:
            line = line.replace(self.endpoint.key, "***")
        return shorten(line[:_SHOWN]) or "nothing"

    def _checked(self, path: str, answer: Response) -> Response:
        if answer.status in {401, 403}:
            given = "refuses the key of" if self.endpoint.key else "asks for a key, expected in"
            raise self._fail(
                f"{path}: the server {given} {self.endpoint.variable} "
                f"({answer.status}: {answer.text})",
                f"set the environment variable {self.endpoint.variable}",
            )
        if httpx.codes.is_redirect(answer.status):
            raise self._fail(f"{path}: {answer.text}", "give the URL it is redirected to")
        return answer

    def _explain_broken(self, error: httpx.RequestError, tls: BaseException | None) -> str:
        if tls is not None:
            return f"TLS: {self._clean(first_line(tls))}"
        if isinstance(error, httpx.ConnectTimeout):
            return f"no connection within {_CONNECT_S:g} s"
        if isinstance(error, httpx.ConnectError):
            return f"no connection: {self._clean(first_line(error))}"
        if isinstance(error, httpx.DecodingError):
            return f"the answer cannot be decompressed: {self._clean(first_line(error))}"
        return f"the connection broke: {self._clean(first_line(error))}"

    def _fail(self, what: str, hint: str) -> ServerError:
        return ServerError(f"{self.endpoint.url}{what}", hint=hint)


def _find_message(body: Any) -> str:
    """Find the message of an error in the forms that vLLM, SGLang and proxies use."""
    if not isinstance(body, dict):
        return ""
    found = body.get("error", body.get("message", body.get("detail", "")))
    if isinstance(found, dict):
        found = found.get("message", "")
    return found if isinstance(found, str) else json.dumps(found)


def _read_delay(response: httpx.Response) -> float | None:
    try:
        return max(float(response.headers.get("retry-after", "")), 0.0)
    except ValueError:
        return None


def _find_tls(error: httpx.RequestError) -> BaseException | None:
    """Find the TLS error behind a broken connection."""
    found: BaseException | None = None if isinstance(error, httpx.TimeoutException) else error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    return found
