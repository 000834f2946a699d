"""The scales of a running vLLM: faults that are planted there are found, and refits are read back.

With FP8CALIB_RECORD=1 what the ranks answered is written for `tests/plugins/vllm`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8calib.plugins.vllm.live_scales import READ_ATTRIBUTE
from tests.cli.program import run
from tests.plugins.vllm.live_cases import (
    FAULTS,
    GOLDENS,
    Answers,
    list_changes,
    load_answers,
    write_model,
)
from tests.real_engines.test_vllm_server import FP8, serve
from tests.real_engines.vllm_job import PYTHON, ROOT, VllmServer

TEXT = [list(range(5, 45))]
TINY = {"dtype": "float32"}
SCORED = ("zeros_on_device", "stale_float", "stale_cpu", "swapped")
"""Faults with which the kernel still runs: it refuses zero."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    write_model(folder / "good")
    write_model(folder / "other", factor=1.3)
    write_model(folder / "two", layers=2)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path, vllm: VllmServer) -> dict[str, Any]:
    """Plant every fault in one engine of two ranks, each followed by a refit."""
    good = str(folder / "good")
    steps: dict[str, Sequence[Any]] = {"clean": ["read"], "audit": ["audit", good]}
    steps["score"] = ["score", TEXT]
    for fault in FAULTS:
        steps[f"plant {fault}"] = ["plant", fault]
        steps[fault] = ["read"]
        steps[f"audit {fault}"] = ["audit", good]
        if fault in SCORED:
            steps[f"score {fault}"] = ["score", TEXT]
        steps[f"refit {fault}"] = ["refit", good]
        steps[f"again {fault}"] = ["audit", good]
    steps["score again"] = ["score", TEXT]
    steps |= {"sleep": ["sleep"], "asleep": ["audit", good], "wake": ["wake"]}
    steps["awake"] = ["audit", good]
    steps["other"] = ["audit", str(folder / "other")]
    steps["refit two"] = ["refit", str(folder / "two")]
    steps["refit other"] = ["refit", str(folder / "other")]
    steps["score other"] = ["score", TEXT]
    steps["audit other"] = ["audit", str(folder / "other")]
    options = {**TINY, "model": good, "tensor_parallel_size": 2}
    (found,) = vllm.run((options, [*steps.values()]))
    answered = dict(zip(steps, found, strict=True))
    if os.environ.get("FP8CALIB_RECORD"):
        record(answered)
    return answered


def record(answered: Mapping[str, Any]) -> None:
    clean: Answers = answered["clean"]
    faults = {fault: list_changes(clean, answered[fault]) for fault in FAULTS}
    lines = ",\n".join(f'    "{name}": {json.dumps(each)}' for name, each in faults.items())
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(f'{{\n  "clean": {json.dumps(clean)},\n  "faults": {{\n{lines}\n  }}\n}}\n')


def test_the_ranks_answer_what_is_recorded(answers: Mapping[str, Any]) -> None:
    recorded = load_answers()

    assert {name: answers[name] for name in recorded} == recorded


def test_an_engine_without_a_fault_has_no_finding(answers: Mapping[str, Any]) -> None:
    assert answers["audit"]["ok"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_a_refit_repairs_it(
    answers: Mapping[str, Any], fault: str
) -> None:
    assert not answers[f"audit {fault}"]["ok"]
    assert answers[f"refit {fault}"]["ok"]
    assert answers[f"again {fault}"]["ok"]


def test_the_cpu_backend_computes_with_the_host_float_alone(answers: Mapping[str, Any]) -> None:
    """So says the source of the backend, which the audit reads."""
    clean = answers["score"]

    assert answers["score zeros_on_device"] == answers["score stale_cpu"] == clean
    assert (
        max(abs(x - y) for x, y in zip(*answers["score stale_float"], *clean, strict=True)) > 1e-3
    )
    assert answers["score swapped"] != clean
    assert answers["score again"] == clean


def test_other_scales_are_found_refitted_and_computed_with(answers: Mapping[str, Any]) -> None:
    assert not answers["other"]["ok"]
    assert answers["refit other"]["ok"]
    assert answers["audit other"]["ok"]
    assert answers["score other"] != answers["score"]


def test_a_paused_engine_is_not_asked(answers: Mapping[str, Any]) -> None:
    assert "the engine sleeps or is paused" in answers["asleep"]["message"]
    assert answers["awake"]["ok"]


def test_scales_of_another_number_of_layers_are_refused(answers: Mapping[str, Any]) -> None:
    assert (
        "for the layers 0, 1, and the engine has the layers 0-3" in answers["refit two"]["message"]
    )


def test_a_cache_of_16_bits_is_found_and_not_refitted(folder: Path, vllm: VllmServer) -> None:
    good = str(folder / "good")
    options = {"model": good, "kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}

    ((audit, refit),) = vllm.run((options, [["audit", good], ["refit", good]]))

    (engine,) = audit["engines"].values()
    assert {layer["k"]["status"] for layer in engine["layers"]} == {"dropped"}
    assert "layers 0-3: kv_cache_dtype is bfloat16" in engine["layers"][0]["k"]["why"]
    assert "the KV cache is not FP8" in refit["message"]


def test_an_engine_without_the_extension_names_the_argument(folder: Path, vllm: VllmServer) -> None:
    good = str(folder / "good")

    ((audit,),) = vllm.run(({**TINY, "model": good, "worker_extension_cls": ""}, [["audit", good]]))

    assert audit["error"] == "usage"
    assert "worker_extension_cls='fp8calib.plugins.vllm.worker.FP8CalibWorker'" in audit["hint"]


READ = {
    "cpu_attn": {"_k_scale_float", "_v_scale_float"},
    "flash_attn": {"_k_scale", "_v_scale", "_q_scale"},
    "triton_attn": {"_k_scale", "_v_scale", "_q_scale"},
    "rocm_aiter_fa": {"_k_scale", "_v_scale", "_k_scale_cpu", "_v_scale_cpu"},
    "flashinfer": {f"_{role}_scale{end}" for role in "kvq" for end in ("", "_float")},
}


@pytest.mark.parametrize("backend", READ)
def test_the_backends_of_gpus_read_these_copies(backend: str) -> None:
    """Their sources are in the package for CPU too; only that of the CPU was run."""
    (source,) = PYTHON.parents[1].glob(
        f"lib/*/site-packages/vllm/v1/attention/backends/{backend}.py"
    )
    text = source.read_text()

    assert {*READ_ATTRIBUTE.findall(text)} == READ[backend]
    keeps = "if self.bmm1_scale is None:" in text and "if self.bmm2_scale is None:" in text
    assert keeps is (backend == "flashinfer")


def test_a_server_is_asked_over_http(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    options = (
        "--skip-tokenizer-init",
        *FP8,
        "--gpu-memory-utilization",
        "0.1",
        "--max-model-len",
        "64",
    )
    worker = "fp8calib.plugins.vllm.worker.FP8CalibWorker"
    extended = (*options, "--worker-extension-cls", worker)

    with serve(folder / "good", folder / "server.log", *extended) as url:
        assert run("vllm", "audit", folder / "good", "--url", url).code == 0
        assert run("vllm", "audit", folder / "other", "--url", url).code == 8
    with serve(folder / "good", folder / "bare.log", *options) as url:
        outcome = run("vllm", "audit", folder / "good", "--url", url)
        assert httpx.get(f"{url}/health").is_success
    assert outcome.code == 4
    assert f"--worker-extension-cls {worker}" in outcome.err
