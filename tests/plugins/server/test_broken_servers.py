"""Servers that break in many ways: one clear message each, in time, with exit code 4."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import fail, succeed
from tests.plugins.server.fake import Asked, Break, FakeServer, Reply

KEY = "sk-secret-7f3a"
TIMEOUT_S = 2.0
SEQUENCES = 3
COMPLETIONS = "/v1/completions"
Command = Callable[[str], tuple[object, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken") / "tiny-llama"
    zoo.save("llama", folder, num_hidden_layers=1)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three rows of token ids."""
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    rows = [{"input_ids": [(7 * i + j) % 90 for j in range(16)]} for i in range(SEQUENCES)]
    return write_rows(path, rows)


@pytest.fixture
def command(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Give what makes the command from a URL, and an empty folder to run it in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda url: ("server", url, model, "--data", data, "--seq-len", 16)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with shorter pauses, to save time."""
    monkeypatch.setattr("fp8calib.plugins.server.client._FIRST_DELAY_S", 0.05)


def predict(ids: Sequence[int]) -> torch.Tensor:
    """Give every token the same probability, but for the one that follows."""
    logits = torch.zeros(len(ids), 128)
    logits[torch.arange(len(ids)), (torch.tensor(list(ids)) + 1) % 128] = 1.0
    return torch.log_softmax(logits, -1)


@pytest.fixture
def ask(command: Command, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a function that verifies against a server, and needs an error."""
    monkeypatch.setenv("FP8CALIB_SERVER_KEY", KEY)

    def asked(code: int, broken: Break, *options: object, **more: Any) -> str:
        with FakeServer(predict, broken=broken, **more) as server:
            started = time.monotonic()
            text = fail(
                *(code, *command(server.url), "--dtype", "float32"),
                *("--server-timeout", TIMEOUT_S, *options),
            )
            assert time.monotonic() - started < 10 * TIMEOUT_S
        assert KEY not in text
        return text

    return asked


def answer(change: Callable[[Asked, Reply], Reply], path: str = COMPLETIONS) -> Break:
    return lambda asked, reply: change(asked, reply) if asked.path == path else reply


def edit(change: Callable[[Any], Any], path: str = COMPLETIONS) -> Break:

    def edited(_asked: Asked, reply: Reply) -> Reply:
        document = reply.json
        found = change(document)
        return reply.with_json(document if found is None else found)

    return answer(edited, path)


def say(status: int, body: str, path: str = COMPLETIONS, **headers: str) -> Break:
    return answer(
        lambda _asked, _reply: Reply(status=status, body=body.encode(), headers=headers), path
    )


def rows(document: Any) -> Any:
    """Give the list of positions in an answer."""
    return document["choices"][0]["prompt_logprobs"]


def set_logprob(value: float | str | None) -> Callable[[Any], Any]:
    """Replace the log-probabilities of one position."""

    def change(document: Any) -> None:
        for entry in rows(document)[3].values():
            entry["logprob"] = value

    return change


def shift(document: Any) -> None:
    """Answer about other tokens."""
    found = rows(document)
    found[3] = {str(int(token) + 1): entry for token, entry in found[3].items()}


def drop_rows(document: Any) -> None:
    """Answer about the end of the prompt only, as a server does that has cached the beginning."""
    del rows(document)[1:6]


def cut_rows(document: Any) -> None:
    """Answer about the beginning of the prompt only, as behind a proxy that cuts it."""
    del rows(document)[-5:]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A broken server, and what the message says."""

    broken: Break
    says: tuple[str, ...]
    code: int = 4
    options: tuple[object, ...] = ()
    server: dict[str, Any] = field(default_factory=dict)


def error(text: str) -> str:
    """Write an error as vLLM does."""
    return json.dumps({"error": {"message": text, "type": "BadRequestError", "code": 400}})


HTML = "<html><head><title>502</title><style>b{}</style></head><body>Bad Gateway</body></html>"
CASES: dict[str, Case] = {
    "truncated json": Case(
        broken=answer(lambda _a, r: replace(r, body=r.body[: len(r.body) // 2])),
        says=("the answer is not JSON: {",),
    ),
    "connection cut in the middle": Case(
        broken=answer(lambda _a, r: replace(r, cut=100)),
        says=("the connection broke", "log may name the cause"),
    ),
    "html with status 200": Case(
        broken=say(200, HTML), says=("not JSON: 502 Bad Gateway", "proxy")
    ),
    "a storm of 429": Case(
        broken=say(429, error("slow down"), **{"retry-after": "0.5"}),
        says=(f"answers 429: slow down, for {TIMEOUT_S:g} s", "--server-concurrency"),
    ),
    "never an answer": Case(
        broken=answer(lambda _a, r: replace(r, delay_s=2 * TIMEOUT_S)),
        says=(f"no answer within {TIMEOUT_S:g} s", "--server-timeout"),
    ),
    "too few positions": Case(
        broken=edit(drop_rows),
        says=("log-probabilities of 10 tokens, not of 15", "--no-enable-prefix-caching"),
    ),
    "a prompt that is cut": Case(
        broken=edit(cut_rows),
        says=("log-probabilities of 10 tokens, not of 15", "proxy that cuts it"),
    ),
    "nan": Case(broken=edit(set_logprob(math.nan)), says=("NaN or inf", "at position 3")),
    "probabilities that add up to 2": Case(
        broken=edit(set_logprob(0.0)),
        says=("position 3 whose probabilities add up to more than 1",),
        options=("--server-logprobs", 2),
    ),
    "another text": Case(broken=edit(shift), says=("is about another text", "position 3")),
    "no prompt_logprobs": Case(
        broken=edit(lambda d: d["choices"].__setitem__(0, {})),
        says=("has no prompt_logprobs", "--server-kind"),
    ),
    "a token of another vocabulary": Case(
        broken=edit(
            lambda d: rows(d).__setitem__(
                2, {each: {"logprob": -9.0} for each in rows(d)[2]} | {"200000": {"logprob": -1e-3}}
            )
        ),
        says=("has token 200000, and the model has 128 tokens",),
    ),
    "capped log-probabilities": Case(
        broken=say(
            400, error("Requested prompt logprobs of 50, which is greater than max allowed: 20")
        ),
        says=("greater than max allowed: 20", "--max-logprobs", "--server-logprobs"),
        options=("--server-logprobs", 50),
    ),
    "a short context, declared": Case(
        broken=lambda _a, r: r,
        says=("takes 16 tokens", "--seq-len 15", "--max-model-len 17"),
        server={"max_model_len": 16},
    ),
    "another tokenizer": Case(
        broken=edit(lambda d: d.update(tokens=[9, *d["tokens"]]), "/tokenize"),
        says=("another model", "its tokenizer turns", "into 9, 2"),
    ),
    "another model by name": Case(
        broken=lambda _a, r: r,
        says=("does not serve llama-70b; it has tiny",),
        options=("--server-model", "llama-70b"),
    ),
    "a key where a log-probability belongs": Case(
        broken=edit(set_logprob(KEY)), says=("a valid number ('***')",)
    ),
    "a wrong key": Case(
        broken=say(401, error(f"bad key {KEY}")),
        says=("refuses the key of FP8CALIB_SERVER_KEY (401: bad key ***)",),
    ),
    "a redirection": Case(
        broken=say(307, "", location="https://login.example.com/"),
        says=("a redirection to login.example.com",),
    ),
    "control sequences": Case(
        broken=say(500, error("\x1b[2Jred\x07")), says=("answers 500: \\x1b[2Jred\\x07",)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_server_gives_one_message(name: str, ask: Any) -> None:
    case = CASES[name]
    text = ask(case.code, case.broken, *case.options, **case.server)
    assert [words for words in case.says if words not in text] == [], text


def test_a_reference_that_writes_tokens_of_another_vocabulary(command: Command) -> None:
    def rewrite(document: Any) -> None:
        if "token_ids" in document["choices"][0]:
            document["choices"][0]["token_ids"][0] = 200000

    with (
        FakeServer(predict) as server,
        FakeServer(predict, broken=edit(rewrite)) as other,
    ):
        text = fail(4, *command(server.url), "--reference-server", other.url, "--sampled")
    assert "the answer to sequence " in text
    assert "has token 200000, and the model has 128 tokens" in text


def test_a_reference_that_is_or_may_be_the_server_itself(command: Command) -> None:
    with FakeServer(predict) as server:
        asked = (*command(server.url), "--reference-server")
        text = fail(2, *asked, f"{server.url}/v1")
        other = server.url.replace("127.0.0.1", "localhost")
        advice = succeed(*asked, other, "--json").json["advice"]
    assert f"--reference-server: {server.url} is the server itself" in text
    assert "neither has an FP8 KV cache, or both are one server" in advice


def test_a_server_that_is_gone_is_named_at_once(command: Command) -> None:
    started = time.monotonic()
    with FakeServer(predict) as server:
        url = server.url
    assert "no connection" in fail(4, *command(url), "--server-timeout", 20)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("number", "reply", "repeated"),
    [
        (0, {"status": 503, "body": b""}, 1),
        # a longer pause than the time-out
        (0, {"status": 429, "body": b"", "headers": {"retry-after": "30"}}, 1),
        (1, {"delay_s": 10.0}, 1),
    ],
    ids=["busy", "a long pause", "no answer"],
)
def test_a_sequence_that_gets_no_answer_is_sent_again(
    command: Command, number: int, reply: dict[str, Any], repeated: int
) -> None:
    def lose(asked: Asked, right: Reply) -> Reply:
        is_lost = asked.path == COMPLETIONS and asked.number == number
        return replace(right, **reply) if is_lost else right

    with FakeServer(predict, broken=lose) as server:
        options = ("--server-timeout", TIMEOUT_S, "--json")
        found = succeed(*command(server.url), *options).json
        assert server.count(COMPLETIONS) == 2 * SEQUENCES + repeated
    assert found["candidates"][0]["name"] == "server"
    assert found["server"]["repeated_requests"] == repeated


@pytest.mark.parametrize("key", [KEY, f"{KEY}\n", f"  {KEY}"], ids=["key", "line", "space"])
def test_the_key_is_sent_without_space_and_never_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("FP8CALIB_SERVER_KEY", key)
    page, dump = tmp_path / "page.html", tmp_path / "dump.safetensors"
    with FakeServer(predict) as server:
        outputs = ("--report", page, "--dump", dump)
        found = succeed(*command(f"{server.url}/v1/"), *outputs)
        sent = {asked.headers.get("Authorization") for asked in server.asked}
    assert sent == {f"Bearer {KEY}"}
    written = found.out + found.err + page.read_text() + dump.read_bytes().decode("latin-1")
    assert KEY not in written


LOCAL = "http://localhost"
CERTIFICATES = "URL: httpx cannot use the certificates or the proxies"
REFUSED: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"SSL_CERT_FILE": "/nonexistent.pem"}, (LOCAL,), CERTIFICATES),
    ({"ALL_PROXY": "socks4://localhost:1"}, (LOCAL,), CERTIFICATES),
    *(
        ({"FP8CALIB_SERVER_KEY": key}, (LOCAL,), "FP8CALIB_SERVER_KEY: the key cannot be sent")
        for key in (f"{KEY}\u00e9", f"a {KEY}")
    ),
    *(
        ({}, (url,), "URL: not the http or https URL of a server")
        for url in (*("localhost:8000", f"http://me:{KEY}@localhost", "http://localhost:99999"),)
    ),
    ({}, (LOCAL, "--server-kind", "x"), "known: vllm, sglang"),
]
"""Variables, the URL and options, the message."""


@pytest.mark.parametrize(("variables", "options", "says"), REFUSED)
def test_what_cannot_be_asked_is_refused_before(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    options: tuple[str, ...],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = fail(2, *command(options[0]), *options[1:])
    assert says in text
    assert ("SSL_CERT_FILE" in text) is (says == CERTIFICATES)
    assert KEY not in text


def test_a_dump_that_does_not_exist_is_refused_before_the_server_is_asked(
    model: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "no-dump").write_text("{}")
    with FakeServer(predict) as server:
        command = ("server", server.url, model, "--data", data, "--reference-dump")
        assert "no such file" in fail(2, *command, tmp_path / "none")
        assert "no-dump" in fail(4, *command, tmp_path / "no-dump")
        assert server.asked == []
