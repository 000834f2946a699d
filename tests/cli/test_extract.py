"""`extract-kv-scales`: from every tool's scales to every form, beside the unquantized model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import zoo
from tests.cli import quantized_sources as sources
from tests.cli.program import fail, snapshot, succeed
from tests.cli.quantized_sources import ATTENTION, K

FILES = {
    "kv-scales": "kv_scales.safetensors",
    "vllm-json": "kv_cache_scales.tp1.json",
    "rfc": "rfc.tp1.json",
}
JSON_RANKS = {"vllm-json": "0", "rfc": "rank0"}
SHARD = "model-00002-of-00002.safetensors"
Extract = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a llama of two layers, 4 heads and 2 KV heads, and nothing else."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    zoo.save("llama", folder)
    return folder


@pytest.fixture
def extract(model: Path, tmp_path: Path) -> Extract:

    def run(source: Path, *options: object, into: Path | None = None) -> Any:
        command = ("extract-kv-scales", "--quantized-model", source, "--model", model)
        out = into or tmp_path / "out"
        return succeed(*command, "--save-path", out, *options, "--json").json

    return run


@pytest.fixture
def refused(model: Path, tmp_path: Path) -> Callable[..., str]:
    """Extract, require the exit code, and that nothing changed anywhere."""

    def run(code: int, source: object, *options: object) -> str:
        before = snapshot(tmp_path)
        given = () if "--model" in options else ("--model", model)
        command = ("extract-kv-scales", "--quantized-model", source, *given)
        text = fail(code, *command, "--save-path", tmp_path / "out", *options)
        assert snapshot(tmp_path) == before
        return text

    return run


def _numbers(path: Path) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in load_file(path).items()}


def _written(out: Path, name: str) -> tuple[list[list[float]], list[list[float]]]:
    """Read k and v of both layers as they stand in what was written, without fp8calib."""
    if name in JSON_RANKS:
        factors = json.loads((out / FILES[name]).read_text())["kv_cache"]["scaling_factor"]
        rank = JSON_RANKS[name]
        assert list(factors) == [rank]
        both = [[factors[rank][str(layer)]] for layer in range(2)]
        return both, both
    found = _numbers(out / FILES.get(name, SHARD))
    k, v = ("kv_scale", "kv_scale") if name == "tgi" else ("k_scale", "v_scale")
    assert len(found) == (2 if name == "tgi" else 4)
    return tuple(  # type: ignore[return-value]
        [found[f"{ATTENTION.format(layer)}.{suffix}"] for layer in range(2)] for suffix in (k, v)
    )


# --- formats of FP8 --------------------------------------------------------------------------


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kv-overlay", "rfc"])
def test_what_was_written_for_one_model_is_not_taken_for_another(
    refused: Callable[..., str], extract: Extract, tmp_path: Path, name: str
) -> None:
    extract(
        sources.save_source("modelopt", tmp_path / "q"), "--format", name, into=tmp_path / "first"
    )
    written = tmp_path / "first" / FILES.get(name, "")
    zoo.save("llama", tmp_path / "other", seed=1)
    text = refused(4, written, "--model", tmp_path / "other")
    assert f"{written}: these scales are of another model: different weights (" in text
    extract(written, into=tmp_path / "again")


# --- what is replaced ------------------------------------------------------------------------


def test_force_replaces_a_checkpoint_and_refuses_strangers(
    extract: Extract, refused: Callable[..., str], tmp_path: Path
) -> None:
    source = sources.save_source("modelopt", tmp_path / "q")
    extract(source)
    assert "--force" in refused(2, source)
    extract(source, "--force", "--fp8-dtype", "e4m3fnuz")
    assert _written(tmp_path / "out", "kv-overlay")[0] == [[2 * number] for number in K]
    (tmp_path / "out" / "mine").touch()
    assert "mine" in refused(2, source, "--force")


def test_the_source_and_the_model_may_not_be_replaced(model: Path, tmp_path: Path) -> None:
    source = sources.save_source("modelopt", tmp_path / "q")
    before = snapshot(model) | snapshot(source)
    command = ("extract-kv-scales", "--quantized-model", source, "--model", model)
    for place in (source, model, tmp_path):
        fail(2, *command, "--save-path", place, "--force")
    assert snapshot(model) | snapshot(source) == before
