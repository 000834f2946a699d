"""What files of scales record about themselves, and that readers use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.read import read_scales
from fp8calib.numerics.formats import E4M3FN
from tests.formats.handmade import (
    MODEL,
    plain_stats,
    write_scales,
)

STATS = plain_stats()
SCALES = {
    f"model.layers.{layer}.self_attn.{role}_scale": torch.tensor(0.5)
    for layer in range(2)
    for role in "kv"
}


def _save(path: Path, dtype: str) -> Path:
    save_file(SCALES, path, metadata={"fp8calib.kv_cache_dtype": dtype})
    return path


@pytest.mark.parametrize("dtype", ["float8_e5m2", "e4m3fn", ""])
def test_a_format_that_kv_scales_are_not_for_is_refused(tmp_path: Path, dtype: str) -> None:
    path = _save(tmp_path / "a.safetensors", dtype)
    with pytest.raises(ModelError, match=r"fp8calib\.kv_cache_dtype is '"):
        read_scales(path, STATS.geometry)


def test_config_and_file_may_not_differ(tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors", "float8_e4m3fnuz")
    config = {"model_type": "llama", "kv_cache_torch_dtype": "float8_e4m3fn"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="several formats: e4m3fn, e4m3fnuz"):
        read_scales(tmp_path, STATS.geometry)


@pytest.mark.parametrize("text", ["", "7", "[" * 100_000, "{}", '{"model": "aa"}'])
def test_a_damaged_word_on_the_model_is_refused(tmp_path: Path, text: str) -> None:
    save_file(SCALES, tmp_path / "a.safetensors", metadata={"fp8calib.measured_on": text})
    with pytest.raises(ModelError, match=r"a\.safetensors: fp8calib\.measured_on is damaged"):
        read_scales(tmp_path / "a.safetensors", STATS.geometry)


def test_a_damaged_word_in_a_json_is_refused(tmp_path: Path) -> None:
    write_scales("vllm-json", compute_kv_scales(STATS, E4M3FN), tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    document["_fp8calib"]["model"] = "yes"
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"a\.json: _fp8calib is damaged: not a fingerprint"):
        read_scales(tmp_path / "a.json", STATS.geometry)


def test_files_of_several_models_are_refused(tmp_path: Path) -> None:
    for layer, model in enumerate((MODEL, MODEL[::-1])):
        own = {name: scale for name, scale in SCALES.items() if f".{layer}." in name}
        metadata = {"fp8calib.measured_on": json.dumps({"model": model})}
        save_file(own, tmp_path / f"{layer}.safetensors", metadata=metadata)
    with pytest.raises(ModelError, match="scales of several models"):
        read_scales(tmp_path, STATS.geometry)
