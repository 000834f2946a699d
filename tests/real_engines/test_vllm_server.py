"""`fp8calib server` asks real vLLM over HTTP; `tests/plugins/server` plants faults."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import save_tokenizer
from tests.cli.program import succeed
from tests.plugins.server import planted
from tests.plugins.server.planted import write_ids
from tests.real_engines.vllm_job import ENVIRONMENT, PYTHON, assert_started

LENGTH = 128
SEQUENCES = 16
QUICK = ("--seq-len", LENGTH, "--dtype", "float32")
START_S = 240.0
FP8 = ("--kv-cache-dtype", "fp8")


@contextmanager
def serve(model: Path, log: Path, *options: object) -> Iterator[str]:
    """Run vLLM's API server until the context closes; give its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "4", "--block-size", "32"),
        *map(str, options),
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=stream, stderr=subprocess.STDOUT
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        code = process.poll()
        assert_started(code, log)
        assert code is None
        try:
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save and calibrate a model that needs scales in one layer, and write text."""
    folder = tmp_path_factory.mktemp("server")
    planted.save_model(folder / "model")
    save_tokenizer(folder / "model")
    data = write_ids(folder / "rows.jsonl", 8, LENGTH, seed=1)
    succeed("calibrate", folder / "model", "--data", data, *QUICK, "--out", folder / "model-out")
    write_ids(folder / "held-out.jsonl", SEQUENCES, LENGTH, seed=2)
    return folder


@pytest.fixture(scope="module")
def ask(place: Path) -> Callable[..., Any]:
    """Give a function that verifies against a server, and returns the report."""

    def asked(url: str, *options: object) -> Any:
        data = ("--data", place / "held-out.jsonl", *QUICK, "--engine", "vllm-cpu")
        scales = ("--scales", place / "model-out" / "kv-overlay")
        command = ("server", url, place / "model", *data, *scales, "--json", *options)
        return succeed(*command).json

    return asked


def test_the_overlay_is_confirmed_and_its_divergence_estimated(
    place: Path, ask: Callable[..., Any]
) -> None:
    overlay = place / "model-out" / "kv-overlay"
    with serve(overlay, place / "overlay.log") as url:
        report = ask(url)
        assert report["advice"].startswith(f"The server is explained by {overlay} (correlation ")
        with serve(place / "model", place / "plain.log") as plain:
            both = ask(url, "--reference-server", plain)
            assert both["advice"].startswith(f"The server is explained by {overlay} (correlation ")
            assert both["server"]["engine"]["change_rms"] < 0.01
            unquantized = ask(plain)
            assert unquantized["advice"].startswith("The server behaves like the unquantized model")
        sampled = ask(url, "--sampled", "--server-logprobs", 20)
    emulated = sampled["candidates"][0]["kld_mean"]
    estimates = sampled["server"]
    for name in ("kld_low_variance", "kld_top"):
        assert estimates[name]["value"] == pytest.approx(emulated, rel=0.2)
    assert estimates["kld_at_least"]["value"] <= emulated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_false_alarm_in_10_runs(dtype: str, place: Path, ask: Callable[..., Any]) -> None:
    with serve(place / "model", place / f"{dtype}.log", "--dtype", dtype) as url:
        for seed in range(10, 20):
            write_ids(place / "text.jsonl", SEQUENCES, LENGTH, seed=seed)
            report = ask(url, "--dtype", dtype, text="text.jsonl")
            plain = "The server behaves like the unquantized model: its KV cache is not FP8"
            assert report["advice"].startswith(plain), (seed, report["advice"])


def test_a_cache_without_scales(place: Path, ask: Callable[..., Any]) -> None:
    with serve(place / "model", place / "unscaled.log", *FP8) as url:
        report = ask(url)
    assert report["advice"].startswith("The server behaves like scale-1.0 (correlation ")
    assert report["advice"].endswith(": your k/v scales are not in use.")
