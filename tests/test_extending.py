"""The examples of docs/extending.md, executed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.torch import load_file

from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.fp8.schemes import SCHEMES, Granularity
from tests import zoo
from tests.cli.conftest import save_tokenizer
from tests.cli.program import succeed
from tests.quantization.by_hand import codes_of, encode, scale_for, to_numpy

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def example(heading: str) -> str:
    """Give the Python code of the one example under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_page_has_its_four_sections() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert headings == ["A dialect", "An engine", "A scheme", "A statistic"]


@pytest.fixture
def _block_weights() -> Iterator[None]:
    """Declare the example's scheme for one test."""
    with mock.patch.dict(SCHEMES):
        exec(example("A scheme"), {})  # noqa: S102 -- the page's own code
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a llama whose weights end inside a block of 64 x 64."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "vocab_size": 96}
    zoo.save("llama", tmp_path / "model", **sizes)
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.usefixtures("_block_weights")
def test_a_scheme_is_quantized_read_back_and_verified(model: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "model.layers.1.mlp.down_proj.weight"
    command = ("quantize", model, "--scheme", "w8a16-block", "--out", out, "--json")
    report = succeed(*command).json
    assert report["scheme"] == "w8a16-block"

    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert group["group_0"]["weights"]["block_structure"] == [64, 64]
    assert group["group_0"]["input_activations"] is None
    weight = to_numpy(load_file(model / "model.safetensors")[name])
    corners = [(row, column) for row in (0, 64) for column in (0, 64, 128)]
    blocks = {(i, j): weight[i : i + 64, j : j + 64] for i, j in corners}
    scales = {at: scale_for(np.abs(block).max()) for at, block in blocks.items()}
    stored = load_file(out / "model.safetensors")
    assert stored[f"{name}_scale"].tolist() == [
        [scales[row, column] for column in (0, 64, 128)] for row in (0, 64)
    ]
    codes = codes_of(stored[name])
    for (i, j), block in blocks.items():
        expected = encode(block, scales[i, j])
        np.testing.assert_array_equal(codes[i : i + 64, j : j + 64], expected)

    with Fp8Checkpoint.open(out, fuse=False) as checkpoint:
        assert checkpoint.granularity(name) is Granularity.BLOCK
        error = np.abs(checkpoint.read(name).numpy() - weight)
        assert 0 < error.max() <= max(scales.values()) * 16
    quick = ("--data", "builtin", "--samples", 2, "--seq-len", 16, "--dtype", "float32", "--json")
    verify = ("verify", model, *quick, "--engine", "reference")
    written = succeed(*verify, "--scales", out).json["candidates"][0]
    emulated = succeed(*verify, "--scheme", "w8a16-block").json["candidates"][0]
    assert 0 < written["kld_mean"] == pytest.approx(emulated["kld_mean"], rel=1e-3)


def test_a_scheme_is_in_the_help_of_quantize_and_verify() -> None:
    show = "from fp8calib.cli import main\nimport sys\nmain([sys.argv[1], '--help'])"
    for command in ("quantize", "verify"):
        program = [sys.executable, "-c", f"{example('A scheme')}\n{show}", command]
        ran = subprocess.run(program, capture_output=True, text=True, check=True)
        assert "w8a16-block" in ran.stdout
