"""A server beside the emulated candidates: its figures, text that is written, other references."""

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
from fp8calib.plugins.server import server as compare_with_server
from fp8calib.plugins.server.answers import AnswerError, WrittenSequence
from fp8calib.plugins.server.decoding import assess_decoding
from fp8calib.plugins.server.result import ServerDecodeResult
from fp8calib.plugins.server.server_kinds import KINDS
from fp8calib.verification.report import VerifyReport
from tests.cli.conftest import write_rows
from tests.cli.program import fail, run, succeed
from tests.plugins.server import planted
from tests.plugins.server.fake import Asked, FakeServer, Predict, Reply

LENGTH = 40
ROWS = 6
QUICK = ("--seq-len", LENGTH, "--dtype", "float32")
ENGINE = ("--engine", planted.ENGINE)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows of text, one of which the tokenizer does not read back."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {"text": " ".join(f"w{(i * j + 7 * j) % 90}" for j in range(1, LENGTH))}
        for i in range(ROWS)
    ]
    ids = {"input_ids": [5, *range(6, 40)]}
    return write_rows(path, [*rows, ids])


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
        with FakeServer(unscaled, kind=kind) as server:
            report = ask(server.url, model, data, "--dump", dump)
        assert report["server"]["kind"] == kind
        found[kind] = (report["candidates"][0], load_file(dump))
    assert {name for name, _ in found["vllm"][1].items()} == {"reference", "server", "scale-1.0"}
    vllm = found["vllm"]
    assert vllm[0] | {"description": ""} == found["sglang"][0] | {"description": ""}
    torch.testing.assert_close(vllm[1]["server"], vllm[1]["scale-1.0"], rtol=0, atol=2e-4)
    emulated = report["candidates"][1]
    assert vllm[0]["top1_agreement"] == pytest.approx(emulated["top1_agreement"], abs=0.01)
    with FakeServer(unscaled) as server:
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

    with FakeServer(unscaled) as server, warnings.catch_warnings():
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

    with FakeServer(predict) as server:
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
        FakeServer(unscaled) as server,
        FakeServer(plain) as writer,
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
        FakeServer(disturb(unscaled)) as server,
        FakeServer(disturb(plain)) as other,
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
        FakeServer(unscaled) as server,
        FakeServer(plain) as other,
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
        FakeServer(unscaled) as server,
        FakeServer(plain, kind="sglang", broken=add_model) as other,
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
    with FakeServer(unscaled) as server:
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


WRITTEN_LENGTH, WRITTEN_ROWS = 32, 4


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write_ids(
        tmp_path_factory.mktemp("ids") / "i.jsonl", WRITTEN_ROWS, WRITTEN_LENGTH, seed=1
    )


def verify(model: Path, data: Path, url: str, *options: object) -> Any:
    size = ("--seq-len", WRITTEN_LENGTH, "--dtype", "float32", "--no-pack", *ENGINE)
    return run("server", url, model, "--data", data, *size, "--decode", *options)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_fault_in_decoding_alone_is_found(
    kind: str, model: Path, ids: Path, plain: Predict, unscaled: Predict
) -> None:
    """Prompts are scored without any fault; each token of a step lacks its scales."""
    with FakeServer(plain, decode=unscaled, kind=kind) as server:
        found = verify(model, ids, server.url, "--json", "--gate", "kv")
    report = found.json
    decoding = report["server"]["decoding"]
    assert report["server"]["finding"] == "unquantized"
    assert (decoding["answer"], decoding["tokens"]) == (
        "worse",
        WRITTEN_ROWS * (WRITTEN_LENGTH // 2 - 1),
    )
    assert decoding["prompt_tokens"] == WRITTEN_ROWS * WRITTEN_LENGTH // 2
    assert decoding["noise_rms"] < 1e-6
    assert report["decision"]["headline"].startswith("Decoding and prompts do not agree: ")
    row = report["candidates"][0]
    assert (row["name"], row["verdict"]) == ("server", "warn")
    assert row["verdict_why"].endswith("decoding and prompts do not agree")


def test_decoding_that_agrees_is_said_to(model: Path, ids: Path, unscaled: Predict) -> None:
    with FakeServer(unscaled) as server:
        found = verify(model, ids, server.url)
    assert found.out.splitlines()[0].startswith("Decoding and prompts agree: the same tokens")
    assert "The server behaves like scale-1.0" in found.out


def assess(
    changes: Sequence[Sequence[float]], *, noise: Sequence[float] = (0.0,)
) -> ServerDecodeResult:
    """Assess answers whose decoded tokens differ by `changes` from those of prompts."""
    shift = torch.tensor(noise).repeat(1000)
    written, again = (
        [
            WrittenSequence(
                ids=torch.arange(3 + len(each)),
                num_prompt=3,
                logprobs=torch.tensor(each) - 2.0 + more[: len(each)],
            )
            for each in changes
        ]
        for more in (shift * 0, shift)
    )
    scored = torch.full((sum(len(each.ids) - 1 for each in written),), -2.0)
    return assess_decoding(written, again, scored, scored)


def test_figures_are_those_of_a_hand() -> None:
    """The first token after a prompt counts for nothing; the noise is half of a change's."""
    found = assess([[9.0, 0.3, -0.1], [9.0, 0.1, 0.1]], noise=[0.2])
    assert found.tokens == 4
    assert found.difference_mean == pytest.approx(0.1)
    assert found.difference_rms == pytest.approx((0.12 / 4) ** 0.5)
    assert found.noise_rms == pytest.approx((0.04 / 2) ** 0.5)


def test_noise_is_no_fault_and_little_text_cannot_tell() -> None:
    generator = torch.Generator().manual_seed(0)
    small = (torch.randn(8, 64, generator=generator) * 0.02).tolist()
    assert assess(small).answer == "no-difference"
    noisy = (torch.randn(8, 400, generator=generator) * 0.2).tolist()
    same = assess(noisy, noise=[0.2 * 2**0.5, -0.2 * 2**0.5])
    assert same.answer in {"no-difference", "cannot-tell"}
    assert assess(noisy).answer == "worse"
    unclear = assess([[0.0, 0.3, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert unclear.answer == "cannot-tell"
    assert unclear.tokens_to_tell is not None
    assert unclear.tokens_to_tell > unclear.tokens
    assert unclear.sentence.endswith(" tokens would tell.")


IDS = [5, 3, 8]
SGLANG = json.loads(
    """{"text": " a", "output_ids": [7], "meta_info": {
    "id": "e2b9", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3,
    "weight_version": "default", "num_retractions": 0,
    "input_token_logprobs": [[null, 5, null], [-1.5, 3, null], [-0.25, 8, null]],
    "output_token_logprobs": [[-0.5, 7, null]], "output_token_logprobs_length": 1,
    "input_top_logprobs": [null, [[-0.5, 4, null], [-1.5, 3, null]],
                           [[-0.25, 8, null], [-2.0, 1, null]]],
    "output_top_logprobs": [[[-0.5, 7, null], [-1.0, 2, null]]],
    "reasoning_tokens": 0, "completion_tokens": 1, "cached_tokens": 0}}"""
)
VLLM = json.loads(
    """{"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [{"index": 0,
    "text": " a", "logprobs": null, "finish_reason": "length", "stop_reason": null,
    "token_ids": [7], "prompt_logprobs": [null,
    {"3": {"logprob": -1.5, "rank": 2, "decoded_token": "y"},
     "4": {"logprob": -0.5, "rank": 1, "decoded_token": "v"}},
    {"8": {"logprob": -0.25, "rank": 1, "decoded_token": "z"},
     "1": {"logprob": -2.0, "rank": 2, "decoded_token": "u"}}]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}}"""
)
ANSWERS = {"vllm": VLLM, "sglang": SGLANG}


@pytest.mark.parametrize("name", KINDS)
def test_a_continuation(name: str) -> None:
    tokens, _ = KINDS[name].read_written(ANSWERS[name], 1, is_drawn=True)
    assert tokens == [7]
    with pytest.raises(AnswerError, match="by 1 tokens, not by 2"):
        KINDS[name].read_written(ANSWERS[name], 2, is_drawn=True)


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("sglang", ("meta_info", "input_token_logprobs"), [[-1.5, 3, None]], "of 1 tokens, not"),
        ("sglang", ("meta_info", "input_token_logprobs"), [], "of 0 tokens, not of 2"),
        (
            "sglang",
            ("meta_info", "input_token_logprobs"),
            None,
            "meta_info.input_token_logprobs: .*valid list",
        ),
        ("sglang", ("meta_info", "input_top_logprobs"), [None], "of 0 positions, not of 2"),
        ("vllm", ("choices",), [], "choices: .*at least 1 item"),
    ],
)
def test_what_is_missing_is_named(name: str, path: tuple[str, ...], value: Any, says: str) -> None:
    answer = json.loads(json.dumps(ANSWERS[name]))
    place = answer
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(AnswerError, match=says):
        KINDS[name].read_scores(answer, IDS, 2)
