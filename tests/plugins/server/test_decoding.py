"""A server that writes text and scores it: both of its paths agree, or they do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.plugins.plan.choices import keep_modules
from fp8calib.plugins.server.answers import SequenceScores, ServerScores
from fp8calib.plugins.server.decoding import Decoded, DecodingAnswers, assess_decoding
from tests.cli.conftest import save_tokenizer
from tests.cli.program import run
from tests.plugins.server import planted
from tests.plugins.server.fake import FakeServer, Predict
from tests.plugins.server.test_broken_servers import tokenize

LENGTH, ROWS = 32, 4
QUICK = ("--seq-len", LENGTH, "--dtype", "float32", "--no-pack", "--engine", planted.ENGINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model that needs scales in one layer, with a tokenizer."""
    folder = tmp_path_factory.mktemp("decoding") / "model"
    planted.save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write_ids(tmp_path_factory.mktemp("data") / "i.jsonl", ROWS, LENGTH, seed=1)


@pytest.fixture(scope="module")
def paths(model: Path) -> tuple[Predict, Predict]:
    """Give what the unquantized model predicts, and an FP8 cache without scales."""
    runner = planted.Runner(model, torch.float32)
    unscaled = runner.emulate(None)
    return runner.predict(keep_modules(unscaled, frozenset())), runner.predict(unscaled)


def verify(model: Path, data: Path, url: str, *options: object) -> Any:
    return run("server", url, model, "--data", data, *QUICK, "--decode", *options)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_fault_in_decoding_alone_is_found(
    kind: str, model: Path, data: Path, paths: tuple[Predict, Predict]
) -> None:
    """Prompts are scored without any fault; each token of a step lacks its scales."""
    plain, faulty = paths
    with FakeServer(plain, decode=faulty, kind=kind, tokenize=tokenize) as server:
        found = verify(model, data, server.url, "--json", "--gate", "kv")
    report = found.json
    decoding = report["server"]["decoding"]
    assert report["server"]["finding"] == "unquantized"
    assert (decoding["answer"], decoding["tokens"]) == ("worse", ROWS * (LENGTH // 2 - 1))
    assert decoding["prompt_tokens"] == ROWS * LENGTH // 2
    assert decoding["noise_rms"] < 1e-6
    assert report["decision"]["headline"].startswith("Decoding and prompts do not agree: ")
    row = report["candidates"][0]
    assert (row["name"], row["verdict"]) == ("server", "warn")
    assert row["verdict_why"].endswith("decoding and prompts do not agree")


def test_decoding_that_agrees_is_said_to(
    model: Path, data: Path, paths: tuple[Predict, Predict]
) -> None:
    _, unscaled = paths
    with FakeServer(unscaled, tokenize=tokenize) as server:
        found = verify(model, data, server.url)
    assert found.out.splitlines()[0].startswith("Decoding and prompts agree: the same tokens")
    assert "The server behaves like scale-1.0" in found.out


def answer(
    changes: Sequence[Sequence[float]], *, noise: Sequence[float] = (0.0,), prompt: int = 3
) -> DecodingAnswers:
    """Make answers whose decoded tokens differ by `changes` from those of prompts."""
    decoded, scores = [], []
    for each in changes:
        ids = torch.arange(prompt + len(each))
        scored = torch.full((len(ids) - 1,), -2.0)
        decoded.append(Decoded(ids=ids, logprobs=scored[prompt - 1 :] + torch.tensor(each)))
        scores.append(_score(scored))
    shift = torch.tensor(noise).repeat(1000)
    again = [
        Decoded(ids=one.ids, logprobs=one.logprobs + shift[: len(one.logprobs)]) for one in decoded
    ]
    return DecodingAnswers(
        decoded=decoded, again=again, scores=_wrap(scores), scores_again=_wrap(scores)
    )


def _score(logprobs: torch.Tensor) -> SequenceScores:
    none = torch.empty(len(logprobs), 0)
    return SequenceScores(logprobs=logprobs, top_ids=none.long(), top_logprobs=none)


def _wrap(scores: Sequence[SequenceScores]) -> ServerScores:
    return ServerScores(url="", kind="vllm", model="m", sequences=tuple(scores))


def test_figures_are_those_of_a_hand() -> None:
    """The first token after a prompt counts for nothing; the noise is half of a change's."""
    found = assess_decoding(answer([[9.0, 0.3, -0.1], [9.0, 0.1, 0.1]], noise=[0.2]))
    assert found.tokens == 4
    assert found.difference_mean == pytest.approx(0.1)
    assert found.difference_rms == pytest.approx((0.12 / 4) ** 0.5)
    assert found.noise_rms == pytest.approx((0.04 / 2) ** 0.5)


def test_noise_is_no_fault_and_little_text_cannot_tell() -> None:
    generator = torch.Generator().manual_seed(0)
    small = (torch.randn(8, 64, generator=generator) * 0.02).tolist()
    assert assess_decoding(answer(small)).answer == "no-difference"
    noisy = (torch.randn(8, 400, generator=generator) * 0.2).tolist()
    same = assess_decoding(answer(noisy, noise=[0.2 * 2**0.5, -0.2 * 2**0.5]))
    assert same.answer in {"no-difference", "cannot-tell"}
    assert assess_decoding(answer(noisy)).answer == "worse"
    unclear = assess_decoding(answer([[0.0, 0.3, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert unclear.answer == "cannot-tell"
    assert unclear.tokens_to_tell is not None
    assert unclear.tokens_to_tell > unclear.tokens
    assert unclear.sentence.endswith(" tokens would tell.")
