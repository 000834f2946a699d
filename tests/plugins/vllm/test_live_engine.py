"""A running vLLM is asked over HTTP and in Python, and gets scales that it did not load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8calib
from fp8calib.plugins import vllm
from tests.cli.conftest import write_rows
from tests.cli.program import run, succeed
from tests.plugins.server.fake import Asked, FakeServer, Reply
from tests.plugins.vllm.live_cases import (
    ANSWERS,
    CLEAN,
    Answers,
    K,
    Recorded,
    V,
    change,
    write_model,
)

WORKER = "--worker-extension-cls fp8calib.plugins.vllm.worker.FP8CalibWorker"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("live") / "good")


def serve(answers: Answers | bytes, *, status: int = 200, is_asleep: bool = False) -> FakeServer:
    """Answer at the endpoint of vLLM's development mode, in the form of its `api_router.py`."""
    body = answers if isinstance(answers, bytes) else json.dumps({"results": answers}).encode()

    def answer(asked: Asked, _: Reply) -> Reply:
        if asked.path == "/is_sleeping":
            return Reply(body=json.dumps({"is_sleeping": is_asleep}).encode())
        is_right = asked.path == "/collective_rpc" and asked.body["method"].startswith("fp8calib_")
        return Reply(body=body, status=status if is_right else 404)

    return FakeServer(lambda _: torch.zeros(1), broken=answer)


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_server_and_an_llm_give_the_same_report(model: Path, fault: str) -> None:
    with serve(ANSWERS[fault]) as server:
        asked = vllm.audit(server.url, model)

    assert asked == vllm.audit(Recorded(ANSWERS[fault]), model)


ERRORS: list[tuple[Callable[[], FakeServer], str, str]] = [
    (lambda: serve(CLEAN, status=404), "no such endpoint", "VLLM_SERVER_DEV_MODE=1 vllm serve"),
    (lambda: serve(b"oops", status=500), "fp8calib_read_scales (500: oops)", WORKER),
    (lambda: serve([]), "do not answer", WORKER),
    (
        lambda: serve([{"version": "0.32.0"}]),
        "read: device: Field required",
        "the same version",
    ),
    (lambda: serve(CLEAN, is_asleep=True), "the engine sleeps or is paused", "POST /wake_up"),
    (lambda: serve([None]), "cannot be read: it: Input", "the same version"),
    (lambda: serve([{**CLEAN[0], "more": 1}]), "read: more: Extra", "the same version"),
]


@pytest.mark.parametrize(("start", "message", "hint"), ERRORS)
def test_a_server_that_does_not_answer_exits_with_4_and_names_the_flag(
    model: Path, start: Callable[[], FakeServer], message: str, hint: str
) -> None:
    with start() as server:
        outcome = run("vllm", "audit", model, "--url", server.url, "--json")

    error = outcome.json["error"]
    assert outcome.code == 4
    assert error["kind"] == "server"
    assert message in error["message"]
    assert hint in error["hint"]


def test_what_is_no_engine_and_no_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")

    class Broken:
        def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[Any]:
            raise AttributeError(f"no {method} with {args}")

    with pytest.raises(fp8calib.UsageError, match=r"a int is neither a vllm.LLM nor"):
        vllm.audit(3, model)
    with pytest.raises(fp8calib.UsageError, match="no fp8calib_read_scales") as raised:
        vllm.audit(Broken(), model)
    assert "worker_extension_cls='fp8calib.plugins.vllm.worker.FP8CalibWorker'" in raised.value.hint
    with pytest.raises(fp8calib.UsageError, match="is no checkpoint folder"):
        vllm.audit(Recorded(CLEAN), scales)


def read_numbers(engine: Recorded) -> list[dict[str, set[str]]]:
    layers: list[dict[str, set[str]]] = [{} for _ in K]
    for answer in engine.answers:
        for index, layer in enumerate(answer["layers"]):
            for role, copies in layer["scales"].items():
                layers[index].setdefault(role, set()).update(*copies.values())
    return layers


def test_scales_of_a_checkpoint_are_written_into_every_copy(tmp_path: Path) -> None:
    engine = Recorded(ANSWERS["zeros"])

    result = vllm.load_kv_scales(engine, write_model(tmp_path / "model", factor=3))

    assert result.ok
    (report,) = result.engines.values()
    assert [layer.layer for layer in report.layers] == [0, 1, 2, 3]
    held = read_numbers(engine)
    assert all(len(numbers) == 1 for layer in held for numbers in layer.values())
    for role, stored in (("k", K), ("v", V), ("q", (1 / 3,) * 4)):
        values = [float(*layer[role]) for layer in held]
        assert values == pytest.approx([3 * each for each in stored])


def test_scales_of_statistics_are_those_of_the_largest_head(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(5, 60))}])
    out = tmp_path / "out"
    data = ("--data", tmp_path / "rows.jsonl", "--dtype", "float32")
    succeed("calibrate", write_model(tmp_path / "plain", factor=0), *data, "--out", out)
    stats = fp8calib.load_stats(out)

    for scales in (stats, out, out / "stats.safetensors", out / "kv-overlay"):
        engine = Recorded(CLEAN)
        assert vllm.load_kv_scales(engine, scales).ok
        for index, layer in enumerate(read_numbers(engine)):
            for role in ("k", "v"):
                sites = {str(site): seen for site, seen in stats.sites.items()}
                amax = sites[f"model.layers.{index}.self_attn.{role}"].amax.max()
                assert float(*layer[role]) == pytest.approx(float(amax) / 448)


def test_an_engine_that_does_not_hold_what_was_written_is_an_error(model: Path) -> None:
    engine = Recorded(ANSWERS["zeros"])
    engine.loses = "float"

    with pytest.raises(fp8calib.VerificationError, match="layers 0-3: the host float of k is 0"):
        vllm.load_kv_scales(engine, model)


def set_cache(_: int, layer: dict[str, Any]) -> None:
    layer["cache_dtype"] = "auto"


REFUSED: list[tuple[Recorded, str]] = [
    (Recorded(change(set_cache)), r"layers 0-3: the KV cache is not FP8 .* is auto"),
    (Recorded(CLEAN, is_busy=True), "requests are running"),
    (Recorded(CLEAN, is_asleep=True), "the engine sleeps or is paused"),
    (
        Recorded([{**each, "has_graphs": True} for each in CLEAN]),
        "CPU_ATTN reads the host float, and CUDA graphs keep the one of their capture",
    ),
]


@pytest.mark.parametrize(("engine", "message"), REFUSED)
def test_scales_that_do_not_fit_are_refused_before_any_is_written(
    model: Path, engine: Recorded, message: str
) -> None:
    before = read_numbers(engine)

    with pytest.raises(fp8calib.Fp8CalibError, match=message):
        vllm.load_kv_scales(engine, model)

    assert read_numbers(engine) == before


def test_an_amd_gpu_with_e4m3fnuz_gets_doubled_scales(model: Path) -> None:
    engine = Recorded([{**each, "is_fnuz": True} for each in CLEAN])

    assert vllm.load_kv_scales(engine, model).ok
    values = [float(*layer["k"]) for layer in read_numbers(engine)]
    assert values == pytest.approx([2 * each for each in K])
