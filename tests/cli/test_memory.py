"""`--memory`: a model that does not fit is streamed, and the files are the same."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers.integrations import accelerate as placing

from fp8calib.machine import anonymous_bytes
from tests import zoo
from tests.cli.conftest import QUICK, save_tokenizer
from tests.cli.program import fail, snapshot, succeed

GIB = 2**30
TABLE_BYTES = 2 * 250_000 * 64 * 4
"""The embedding and the head: nearly all of the model, and not read when it is streamed."""


@pytest.fixture(name="wide", scope="module")
def _wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "wide-llama"
    zoo.save("llama", folder, vocab_size=250_000, hidden_size=64, tie_word_embeddings=False)
    save_tokenizer(folder)
    return folder


def cap_gib(over_bytes: int) -> float:
    """Give a cap that lies so much over what this process holds."""
    held = anonymous_bytes()
    assert held is not None
    return (held + over_bytes) / GIB


def test_a_model_beyond_the_cap_is_streamed_to_the_same_files(
    wide: Path, data: Path, tmp_path: Path
) -> None:
    command = ("calibrate", wide, "--data", data, *QUICK, "--format", "kv-scales", "--json")
    whole = succeed(*command, "--out", tmp_path / "whole")
    cap = cap_gib(64 * 2**20 + TABLE_BYTES // 2)
    streamed = succeed(*command, "--out", tmp_path / "streamed", "--memory", cap)
    assert not whole.json["memory"]["streamed"]
    planned = succeed(*command, "--out", tmp_path / "none", "--dry-run").json["plan"]
    assert not planned["streamed"]
    assert "the whole model is in memory" in whole.err
    found = streamed.json["memory"]
    assert found["streamed"]
    needed, given = _sizes("streaming layer by layer: ", streamed.err)
    assert needed > given
    assert "of weights, 2 layers, and needs" in streamed.err
    assert found["peak_bytes"] <= cap * GIB
    assert found["peak_measured_bytes"] <= cap * GIB
    assert found["read_bytes"] == whole.json["memory"]["read_bytes"]  # every weight is looked at
    assert json.loads((tmp_path / "streamed" / "report.json").read_text())["memory"] == found
    first, second = snapshot(tmp_path / "whole"), snapshot(tmp_path / "streamed")
    del first["report.json"], second["report.json"]
    assert second == first


def _sizes(start: str, text: str) -> list[float]:
    """Read the sizes, in GiB, of the line that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return [float(size) for size in re.findall(r"(\S+) GiB", line)]


@pytest.mark.parametrize(
    ("family", "code", "command", "why"),
    [
        ("mixtral", 6, ("calibrate",), "out of memory while loading the model"),
        ("llama", 8, ("verify", "--scheme", "fp8-dynamic"), "is offloaded"),
    ],
)
def test_a_model_that_cannot_be_spread_is_to_be_streamed(
    family: str, code: int, command: tuple[str, ...], why: str, data: Path, tmp_path: Path
) -> None:
    model = zoo.save(family, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    room = sum(parameter.nbytes for parameter in model.parameters()) // 2
    arguments = (tmp_path / "model", "--data", data, *QUICK, "--device-map", "auto")
    with mock.patch.object(placing, "get_max_memory", return_value={"cpu": room}):
        told = fail(code, *command, *arguments)
    assert why in told
    assert "leave out --device-map" in told


# --- a config alone ------------------------------------------------------------------------------


@pytest.fixture(name="bare", scope="module")
def _bare(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy a model's config and tokenizer, without its weights."""
    folder = tmp_path_factory.mktemp("bare") / "wide-llama"
    shutil.copytree(wide, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


def plan_dry(*command: object) -> dict[str, Any]:
    """Plan a run; leave out what the process holds already."""
    plan: dict[str, Any] = succeed(*command, "--dry-run", "--json").json["plan"]
    del plan["peak_parts"]["process"]
    return plan


@pytest.mark.parametrize("command", ["calibrate", "verify"])
@pytest.mark.parametrize("is_capped", [False, True])
def test_a_config_alone_gives_the_plan_of_its_weights(
    command: str, is_capped: bool, wide: Path, bare: Path, data: Path
) -> None:
    out = ("--out", bare.parent / "out") if command == "calibrate" else ()
    options = ("--data", data, *QUICK, *out)
    fits = succeed(command, wide, *options, "--dry-run", "--json").json["plan"]["peak_bytes"]
    cap = ("--memory", (fits - TABLE_BYTES // 4) / GIB) if is_capped else ()
    whole, found = (plan_dry(command, model, *options, *cap) for model in (wide, bare))
    assert found["streamed"] is whole["streamed"] is is_capped
    assert found["why"].endswith("; there are no weights: sizes follow from config.json")
    for key in ("peak_parts", "read_bytes", "weights_size_bytes", "layers", "dtype", "tokens"):
        assert found[key] == whole[key], key
