"""The overlay of TGI's pull request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.formats.compute import compute_kv_scales
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, Fp8Format
from tests.formats.handmade import plain_stats, save_source, write_scales


def test_every_layer_has_the_larger_of_its_k_and_v_scales(tmp_path: Path) -> None:
    stats = plain_stats()
    source = save_source(stats, tmp_path / "model")
    left_out = write_scales(
        "tgi", compute_kv_scales(stats, E4M3FN), tmp_path / "out", source=source
    )

    scales = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert {name: tensor.item() for name, tensor in scales.items()} == {
        "model.layers.0.self_attn.kv_scale": 0.75,
        "model.layers.1.self_attn.kv_scale": 2.0,
    }
    assert {(tensor.dtype, tensor.shape) for tensor in scales.values()} == {(torch.float32, ())}
    assert list(left_out) == ["model.gguf"]


@pytest.mark.parametrize(
    ("fmt", "dtype", "scale"),
    [(E4M3FN, "float8_e4m3fn", 0.75), (E4M3FNUZ, "float8_e4m3fnuz", 1.399999976158142)],
)
def test_the_config_names_the_dtype_and_has_no_quantization_config(
    tmp_path: Path, fmt: Fp8Format, dtype: str, scale: float
) -> None:
    stats = plain_stats()
    source = save_source(stats, tmp_path / "model")
    write_scales("tgi", compute_kv_scales(stats, fmt), tmp_path / "out", source=source)

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "kv_cache_torch_dtype": dtype}
    scales = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert scales["model.layers.0.self_attn.kv_scale"].item() == scale
