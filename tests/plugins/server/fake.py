"""A small HTTP server that answers as vLLM or SGLang does, from given log-probabilities."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch

from tests.cli.conftest import WORDS

Predict = Callable[[Sequence[int]], torch.Tensor]
"""Token ids -> log-probabilities of the next token at every position: [L, V]."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What goes back; `cut` closes the connection before the last bytes."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    cut: int = 0

    @property
    def json(self) -> Any:
        """The document."""
        return json.loads(self.body)

    def with_json(self, document: Any) -> Reply:
        """Replace the document."""
        return replace(self, body=json.dumps(document).encode())


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request."""

    path: str
    body: Any
    headers: Mapping[str, str]
    number: int
    """Counted from 0 for every path."""


Break = Callable[[Asked, Reply], Reply]


def tokenize(text: str) -> list[int]:
    """Tokenize as the models' tokenizer does."""
    return [WORDS.index(word) if word in WORDS else 2 for word in text.split()]


class FakeServer:
    """Runs in a thread while the context is open."""

    def __init__(
        self,
        predict: Predict,
        *,
        decode: Predict | None = None,
        kind: str = "vllm",
        broken: Break = lambda _asked, reply: reply,
        max_model_len: int = 4096,
        certificate: Path | None = None,
    ) -> None:
        self._predict = predict
        self._decode = decode or predict
        self._kind = kind
        self._broken = broken
        self._max_model_len = max_model_len
        self._certificate = certificate
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self.asked: list[Asked] = []

    def __enter__(self) -> Self:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):  # the client gave up
                    super().handle()

            def do_GET(self) -> None:
                outer._serve(self, None)

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                body = self.rfile.read(size)
                if len(body) == size:  # the client did not give up
                    outer._serve(self, json.loads(body))

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def count(self, path: str) -> int:
        """Give the number of requests for a path."""
        return self._counts.get(path, 0)

    def _serve(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        with self._lock:
            number = self._counts.get(handler.path, 0)
            self._counts[handler.path] = number + 1
            asked = Asked(
                path=handler.path, body=body, headers=dict(handler.headers), number=number
            )
            self.asked.append(asked)
            reply = self._broken(asked, self._answer(asked))
        time.sleep(reply.delay_s)
        try:
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            handler.send_header("content-length", str(len(reply.body)))
            handler.end_headers()
            handler.wfile.write(reply.body[: len(reply.body) - reply.cut])
        except OSError:
            return  # the client gave up

    def _answer(self, asked: Asked) -> Reply:  # noqa: PLR0911 -- one for every path
        match asked.path:
            case "/v1/models":
                card = {"id": "tiny", "owned_by": self._kind, "max_model_len": self._max_model_len}
                return _reply({"object": "list", "data": [card]})
            case "/tokenize":
                return _reply({"tokens": tokenize(asked.body["prompt"])})
            case "/generate" if "logprob_start_len" in asked.body:
                return _reply(self._score_ids(asked.body))
            case "/generate":
                body = asked.body["sampling_params"]
                ids, logprobs = self._continue(
                    asked.body["input_ids"], body["max_new_tokens"], body
                )
                tokens = [[x, each, None] for each, x in zip(ids, logprobs, strict=True)]
                return _reply({"output_ids": ids, "meta_info": {"output_token_logprobs": tokens}})
            case "/v1/completions" if "prompt_logprobs" in asked.body:
                rows = self._score(asked.body["prompt"], asked.body["prompt_logprobs"])
                return _reply({"model": "tiny", "choices": [{"text": "", "prompt_logprobs": rows}]})
            case "/v1/completions":
                ids, logprobs = self._continue(
                    asked.body["prompt"], asked.body["max_tokens"], asked.body
                )
                found = {"text": "", "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
                return _reply({"model": "tiny", "choices": [found]})
        return Reply(body=b'{"error": {"message": "Not Found"}}', status=404)

    def _score(self, ids: list[int], count: int) -> list[Any]:
        logprobs = self._predict(ids)[:-1].float()
        top = logprobs.topk(count, -1)
        rows: list[Any] = [None]
        for row, token, best in zip(logprobs, ids[1:], top.indices, strict=True):
            tokens = dict.fromkeys([token, *best.tolist()])
            rank = int((row > row[token]).sum()) + 1
            rows.append(
                {
                    str(each): {"logprob": float(row[each]), "rank": rank, "decoded_token": "x"}
                    for each in tokens
                }
            )
        return rows

    def _score_ids(self, body: Mapping[str, Any]) -> Any:
        ids, count = body["input_ids"], body["top_logprobs_num"]
        logprobs = self._predict(ids).float()
        sent = [[float(logprobs[at, token]), token, None] for at, token in enumerate(ids[1:])]
        best = logprobs[:-1].topk(count, -1)
        tops = [
            [[value, token, None] for value, token in zip(*row, strict=True)]
            for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "input_token_logprobs": [[None, ids[0], None], *sent],
                "input_top_logprobs": [None, *tops],
            },
        }

    def _continue(
        self, prompt: Sequence[int], count: int, sampling: Mapping[str, Any]
    ) -> tuple[list[int], list[float]]:
        """Draw tokens, or take the most likely ones; those after the first are decoded."""
        generator = torch.Generator().manual_seed(sampling.get("seed", 0))
        ids, logprobs = list(prompt), []
        for place in range(count):
            predict = self._decode if place else self._predict
            found = predict(ids)[-1].float()
            if sampling["temperature"]:
                token = int(torch.multinomial(found.exp(), 1, generator=generator))
            else:
                token = int(found.argmax())
            ids.append(token)
            logprobs.append(float(found[token]))
        return ids[len(prompt) :], logprobs


def _reply(document: Any) -> Reply:
    return Reply(body=json.dumps(document).encode(), headers={"content-type": "application/json"})
