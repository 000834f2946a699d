"""Finding scales in a file or folder; our own files read back to equal numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError, UsageError
from fp8calib.formats.read import has_kv_scales, read_scales
from tests.formats.handmade import (
    plain_stats,
)

GEOMETRY = plain_stats().geometry
SCALES = {
    f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5)
    for layer in range(2)
    for name in ("k_scale", "v_scale")
}
JSON = json.dumps(
    {
        "model_type": "llama",
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 2.0}}},
    }
)


@pytest.mark.parametrize("name", ["missing", "missing.json", "missing/a.safetensors"])
def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "link"):
        for call in (lambda p: read_scales(p, GEOMETRY), has_kv_scales):
            with pytest.raises(UsageError, match="no such file or folder"):
                call(path)


@pytest.mark.parametrize("name", ["model.bin", "scales", "scales.txt", "model.gguf", "a.yaml"])
def test_other_kinds_of_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(JSON)
    with pytest.raises(ModelError, match="not a scales file"):
        read_scales(tmp_path / name, GEOMETRY)


def test_a_folder_with_one_json_of_scales_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "kv_cache_scales.tp1.json").write_text(JSON)
    (tmp_path / "report.json").write_text('{"kv_cache": {}}')
    (tmp_path / "tokenizer.json").write_text('{"broken')
    assert has_kv_scales(tmp_path)
    assert read_scales(tmp_path, GEOMETRY).table.dialect == "vllm-json"

    (tmp_path / "kv_cache_scales.tp2.json").write_text(JSON)
    with pytest.raises(ModelError, match=r"several files .*tp1\.json, .*tp2\.json"):
        read_scales(tmp_path, GEOMETRY)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file(SCALES, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ModelError, match="model_type is 'mistral', the model's is"):
            read_scales(path, GEOMETRY)
