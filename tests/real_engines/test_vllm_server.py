"""`fp8calib server` asks real vLLM over HTTP, and tells planted faults from each other."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

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
    for name, seed, large in (("model", 0, planted.NEEDS_SCALES), ("another", 3, 2)):
        planted.save_model(folder / name, seed=seed, large=large)
        save_tokenizer(folder / name)
        data = write_ids(folder / f"{name}.jsonl", 8, LENGTH, seed=1)
        succeed("calibrate", folder / name, "--data", data, *QUICK, "--out", folder / f"{name}-out")
    write_ids(folder / "held-out.jsonl", SEQUENCES, LENGTH, seed=2)
    return folder


@pytest.fixture(scope="module")
def ask(place: Path) -> Callable[..., Any]:
    """Give a function that verifies against a server, and returns the report."""

    def asked(url: str, *options: object, text: str = "held-out.jsonl") -> Any:
        data = ("--data", place / text, *QUICK, "--engine", "vllm-cpu")
        scales = ("--scales", place / "model-out" / "kv-overlay")
        command = ("server", url, place / "model", *data, *scales, "--json", *options)
        return succeed(*command).json

    return asked


def save_overlay(place: Path, name: str, change: Callable[[str, float], float]) -> Path:
    """Copy the overlay with other scales."""
    folder = place / name
    shutil.copytree(place / "model-out" / "kv-overlay", folder)
    (path,) = (p for p in folder.glob("*.safetensors") if _has_scales(p))
    tensors = {key: value * 0 + change(key, float(value)) for key, value in load_file(path).items()}
    path.unlink()  # hard links of the overlay stay as they are
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _has_scales(path: Path) -> bool:
    return any(name.endswith(".k_scale") for name in load_file(path))


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


CHANGES: dict[str, Callable[[str, float], float]] = {
    "values of layer 2 clip, as its scales are too small.": (
        lambda name, x: x / 8 if ".2." in name else x
    ),
    "the k/v scales of layer 1 are not in use.": lambda name, x: 1.0 if ".1." in name else x,
}


@pytest.mark.parametrize("advice", CHANGES)
def test_one_layer_with_other_scales(place: Path, ask: Callable[..., Any], advice: str) -> None:
    folder = save_overlay(place, advice[:8], CHANGES[advice])
    with serve(folder, place / "changed.log") as url:
        report = ask(url)
    assert report["advice"].endswith(f": {advice}")


def test_the_scales_of_another_model(place: Path, ask: Callable[..., Any]) -> None:
    (path,) = (
        p for p in (place / "another-out/kv-overlay").glob("*.safetensors") if _has_scales(p)
    )
    others = load_file(path)
    # Without the factor they would be those of the previous layers: one layer's values are large.
    folder = save_overlay(place, "others", lambda name, _: 3 * float(others[name]))
    with serve(folder, place / "others.log") as url:
        report = ask(url)
    assert report["advice"].startswith("The server differs from ")
