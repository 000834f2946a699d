"""A server beside the emulated candidates: its figures, text that is written, other references."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fp8calib
from fp8calib.plugins.plan.choices import keep_modules
from fp8calib.plugins.server import server as compare_with_server
from fp8calib.verification.report import VerifyReport
from tests.cli.conftest import save_tokenizer
from tests.cli.program import fail, run, succeed
from tests.plugins.server import planted
from tests.plugins.server.fake import Asked, FakeServer, Predict, Reply
from tests.plugins.server.test_broken_servers import tokenize

LENGTH = 40
ROWS = 6
QUICK = ("--seq-len", LENGTH, "--dtype", "float32")
ENGINE = ("--engine", planted.ENGINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model that needs scales in one layer, with a tokenizer."""
    folder = tmp_path_factory.mktemp("server") / "model"
    planted.save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows of text, one of which the tokenizer does not read back."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {"text": " ".join(f"w{(i * j + 7 * j) % 90}" for j in range(1, LENGTH))}
        for i in range(ROWS)
    ]
    ids = {"input_ids": [5, *range(6, 40)]}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, ids]))
    return path


@pytest.fixture(scope="module")
def runner(model: Path) -> planted.Runner:
    """Compute what the server computes, in fp32."""
    return planted.Runner(model, torch.float32)


@pytest.fixture(scope="module")
def unscaled(runner: planted.Runner) -> Predict:
    """Give what a server without scales predicts."""
    return runner.predict(runner.emulate(None))


@pytest.fixture(scope="module")
def plain(runner: planted.Runner) -> Predict:
    """Give what an unquantized server predicts."""
    return runner.predict(keep_modules(runner.emulate(None), frozenset()))


def ask(url: str, model: Path, data: Path, *options: object) -> Any:
    return succeed(
        "server", url, model, "--data", data, *QUICK, *ENGINE, "--no-pack", "--json", *options
    ).json


def test_every_kind_gives_the_same_figures(
    model: Path, data: Path, unscaled: Predict, tmp_path: Path
) -> None:
    found = {}
    for kind in ("vllm", "sglang"):
        dump = tmp_path / f"{kind}.safetensors"
        with FakeServer(unscaled, kind=kind, tokenize=tokenize) as server:
            report = ask(server.url, model, data, "--dump", dump)
        assert report["server"]["kind"] == kind
        found[kind] = (report["candidates"][0], load_file(dump))
    assert {name for name, _ in found["vllm"][1].items()} == {"reference", "server", "scale-1.0"}
    vllm = found["vllm"]
    assert vllm[0] | {"description": ""} == found["sglang"][0] | {"description": ""}
    torch.testing.assert_close(vllm[1]["server"], vllm[1]["scale-1.0"], rtol=0, atol=2e-4)
    emulated = report["candidates"][1]
    assert vllm[0]["top1_agreement"] == pytest.approx(emulated["top1_agreement"], abs=0.01)
    with FakeServer(unscaled, tokenize=tokenize) as server:
        report = ask(server.url, model, data, "--server-logprobs", 0)
    assert report["candidates"][0] == vllm[0] | {
        "description": report["candidates"][0]["description"],
        "top1_agreement": None,
        "top1_se": None,
    }


def test_the_python_function_gives_the_same_report(
    model: Path, data: Path, unscaled: Predict
) -> None:
    async def in_a_notebook(url: str) -> VerifyReport:
        return compare_with_server(
            url,
            model,
            data=data,
            seq_len=LENGTH,
            dtype="float32",
            engine=planted.ENGINE,
            pack=False,
            server_logprobs=2,
        )

    with FakeServer(unscaled, tokenize=tokenize) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
        expected = ask(server.url, model, data, "--server-logprobs", 2)
        found = asyncio.run(in_a_notebook(server.url)).model_dump(mode="json")
    assert found["server"] == expected["server"]
    assert found["candidates"] == expected["candidates"]
    assert found["decision"] == expected["decision"]


def test_a_server_that_no_candidate_explains_does_not_just_pass(
    model: Path, data: Path, plain: Predict
) -> None:
    """It serves a model that predicts this text better."""

    def predict(ids: Sequence[int]) -> torch.Tensor:
        logits = plain(ids).clone()
        logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])] += 2.0
        return torch.log_softmax(logits, -1)

    with FakeServer(predict, tokenize=tokenize) as server:
        report = ask(server.url, model, data, "--gate", "kv")
    row = report["candidates"][0]
    assert row["ppl_ratio"] < 0.9
    assert report["server"]["finding"] == "unknown"
    assert (row["name"], row["verdict"]) == ("server", "warn")
    assert row["verdict_why"].endswith("but no candidate explains what the server changes")


@pytest.mark.parametrize("is_reference", [False, True])
def test_the_divergence_on_text_that_the_model_wrote(
    model: Path,
    data: Path,
    unscaled: Predict,
    plain: Predict,
    tmp_path: Path,
    *,
    is_reference: bool,
) -> None:
    dump = tmp_path / "dump.safetensors"
    with (
        FakeServer(unscaled, tokenize=tokenize) as server,
        FakeServer(plain, tokenize=tokenize) as writer,
    ):
        reference = ("--reference-server", writer.url) if is_reference else ()
        report = ask(
            server.url, model, data, "--sampled", "--server-logprobs", 8, *reference,
            "--dump", dump,
        )  # fmt: skip
        assert writer.count("/v1/completions") == (2 * (ROWS + 1) if is_reference else 0)
    logprobs = load_file(dump)
    lengths = [LENGTH] * ROWS + [35]
    own = torch.cat([torch.arange(1, length) >= 16 for length in lengths])
    difference = (logprobs["server"] - logprobs["reference"])[own].double()
    found = report["server"]
    low = (difference.exp() - 1 - difference).mean().item()
    assert found["kld_low_variance"]["value"] == pytest.approx(low, rel=1e-3)
    assert found["kld_log_ratio"]["value"] == pytest.approx(-difference.mean().item(), abs=1e-3)
    assert report["candidates"][0]["kld_mean"] == found["kld_low_variance"]["value"]
    full = report["candidates"][1]["kld_mean"]  # the server is scale-1.0
    assert found["kld_at_least"]["value"] < full
    assert found["kld_top"]["value"] == pytest.approx(full, rel=0.3)
    assert low == pytest.approx(full, rel=0.3)


def test_engine_differences_are_subtracted(
    model: Path, data: Path, unscaled: Predict, plain: Predict
) -> None:
    """Both servers err alike: what is left is what FP8 changes."""

    def disturb(predict: Predict) -> Predict:
        def disturbed(ids: Any) -> torch.Tensor:
            logits = predict(ids)
            seed = torch.Generator().manual_seed(sum(ids))
            noise = torch.randn(logits.shape, generator=seed)
            return torch.log_softmax(logits + noise, -1)

        return disturbed

    with (
        FakeServer(disturb(unscaled), tokenize=tokenize) as server,
        FakeServer(disturb(plain), tokenize=tokenize) as other,
    ):
        report = ask(server.url, model, data, "--reference-server", other.url)
    assert report["advice"].startswith("The server behaves like scale-1.0 (correlation 0.")
    engine = report["server"]["engine"]
    assert engine["change_rms"] == pytest.approx(1.0, abs=0.2)
    assert engine["url"] == other.url


def test_a_model_that_does_not_fit_is_compared_with_a_server(
    model: Path, data: Path, unscaled: Predict, plain: Predict
) -> None:
    with (
        FakeServer(unscaled, tokenize=tokenize) as server,
        FakeServer(plain, tokenize=tokenize) as other,
    ):
        command = ("server", server.url, model, "--data", data, *QUICK, *ENGINE, "--memory", "1M")
        assert "--memory" in fail(2, *command)
        found = run(*command, "--reference-server", other.url, "--sampled", "--json")
    assert found.code == 0
    assert "warning: nothing is emulated here: " in found.err
    report = found.json
    assert report["advice"].startswith("nothing was emulated: perplexity ratio ")
    assert [one["name"] for one in report["candidates"]] == ["server"]
    assert report["candidates"][0]["kld_mean"] > 0


def test_the_other_server_has_a_kind_and_a_model_of_its_own(
    model: Path, data: Path, unscaled: Predict, plain: Predict
) -> None:
    def add_model(asked: Asked, reply: Reply) -> Reply:
        if asked.path != "/v1/models":
            return reply
        cards = [*reply.json["data"], {"id": "other", "owned_by": "sglang"}]
        return reply.with_json({"data": cards})

    with (
        FakeServer(unscaled, tokenize=tokenize) as server,
        FakeServer(plain, kind="sglang", tokenize=tokenize, broken=add_model) as other,
    ):
        options = ("--server-kind", "vllm", "--reference-server", other.url)
        text = fail(4, "server", server.url, model, "--data", data, *QUICK, *ENGINE, *options)
        assert "serves 2 models; it has tiny, other" in text
        assert "--reference-server-model" in text
        report = ask(server.url, model, data, *options, "--reference-server-model", "tiny")
    assert report["server"]["engine"]["kind"] == "sglang"


def test_a_dump_of_another_machine_replaces_the_model(
    model: Path, data: Path, unscaled: Predict, tmp_path: Path
) -> None:
    dump = tmp_path / "dump.safetensors"
    succeed("verify", model, "--data", data, *QUICK, *ENGINE, "--no-pack", "--dump", dump)
    with FakeServer(unscaled, tokenize=tokenize) as server:
        report = ask(server.url, model, data, "--reference-dump", dump)
        assert report["advice"] == (
            "The server behaves like scale-1.0 (correlation 1.00): FP8 without scales."
        )
        assert [one["name"] for one in report["candidates"]] == ["server"]
        other = ("server", server.url, model, "--data", data, "--reference-dump", dump)
        before = server.count("/v1/completions")
        assert "of another text" in fail(5, *other, "--seq-len", 20)
        assert server.count("/v1/completions") == before
        assert "--sampled: a dump has other text" in fail(2, *other, "--sampled")
        tensors = load_file(dump)
        with safe_open(dump, "pt") as file:
            metadata = file.metadata()
        tensors["reference"][3] = float("nan")
        save_file(tensors, dump, metadata=metadata)
        damaged = fail(5, *other, *QUICK, *ENGINE, "--no-pack")
        assert "damaged: reference has NaN or infinity" in damaged
