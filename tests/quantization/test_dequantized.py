"""FP8 checkpoints as sources: read back, and quantized in another way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.registry import find_written
from fp8calib.numerics.schemes import find_scheme
from fp8calib.quantization.layer_schemes import LayerSchemes
from fp8calib.quantization.plan import PlanSettings, make_plan
from fp8calib.quantization.quantize import quantize
from fp8calib.quantization.select import select
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.decoded import open_dequantized
from tests.quantization.by_hand import CONFIG, LAYER, Silent, codes_of, encode, read, scale_for

ROWS, COLUMNS = 300, 200
UP, DOWN = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a fine-grained FP8 checkpoint, blocks of 128 x 128, as DeepSeek publishes them."""
    folder = tmp_path / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors = {"model.embed_tokens.weight": torch.ones(160, 8, dtype=torch.bfloat16)}
    for name in (UP, DOWN):
        values = torch.randn(ROWS, COLUMNS, generator=generator)
        tensors[f"{name}.weight"] = (values * 100).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.rand(3, 2, generator=generator) + 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return folder


def values_of(folder: Path, name: str) -> np.ndarray:
    """Multiply every code by the scale of its block, one by one."""
    tensors = read(folder)
    codes = tensors[f"{name}.weight"].float().numpy()
    scales = tensors[f"{name}.weight_scale_inv"].numpy()
    rows, columns = np.arange(ROWS) // 128, np.arange(COLUMNS) // 128
    return codes * scales[np.ix_(rows, columns)]


def run(source: Path, out: Path, scheme: str, *ignore: str) -> dict[str, torch.Tensor]:
    found = find_scheme(scheme)
    dialect = find_written("compressed-tensors", found)
    with open_dequantized(source) as checkpoint:
        check_unquantized(checkpoint)
        asked = PlanSettings(schemes=LayerSchemes(found), dialect=dialect, ignore=ignore)
        plan = make_plan(checkpoint, asked, select(checkpoint, ignore=ignore))
        quantize(checkpoint, plan, out, device=torch.device("cpu"), advance=Silent().advance)
    return read(out)


def test_weights_are_read_back_and_rounded_but_once(source: Path, tmp_path: Path) -> None:
    found = run(source, tmp_path / "out", "fp8-dynamic")
    for name in (UP, DOWN):
        values = values_of(source, name)
        scale = scale_for(np.abs(values).max(1, keepdims=True))
        assert np.array_equal(found[f"{name}.weight_scale"].numpy(), scale)
        assert np.array_equal(codes_of(found[f"{name}.weight"]), encode(values, scale))
    assert not any(key.endswith("_inv") for key in found)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_what_is_left_is_written_in_the_dtype_of_the_config(source: Path, tmp_path: Path) -> None:
    found = run(source, tmp_path / "out", "w8a16", "*.down_proj")
    expected = torch.from_numpy(values_of(source, DOWN)).bfloat16()
    assert torch.equal(found[f"{DOWN}.weight"], expected)
    assert f"{DOWN}.weight_scale" not in found
    assert found[f"{UP}.weight"].dtype is torch.float8_e4m3fn


def test_without_being_asked_it_is_refused(source: Path) -> None:
    with Checkpoint.open(source) as checkpoint, pytest.raises(ModelError) as raised:
        check_unquantized(checkpoint)
    assert "--dequantize" in raised.value.hint
