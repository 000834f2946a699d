"""What files of scales say of themselves, and that readers believe it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.kv_overlay import write_kv_overlay
from fp8calib.dialects.kv_scales import write_kv_scales
from fp8calib.dialects.reading import read_scales
from fp8calib.dialects.scale_metadata import Provenance, find_recorded_format, make_metadata
from fp8calib.errors import VerificationError
from fp8calib.fp8 import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.scales import compute_kv_scales

from .handmade import plain_stats, save_source

STATS = plain_stats()
FORMATS = (E4M3FN, E4M3FNUZ)
SCALES = {
    f"model.layers.{layer}.self_attn.{role}_scale": torch.tensor(0.5)
    for layer in range(2)
    for role in "kv"
}


def _save(path: Path, dtype: str) -> Path:
    save_file(SCALES, path, metadata={"fp8calib.kv_cache_dtype": dtype})
    return path


def test_nothing_to_say_is_nothing_said() -> None:
    assert make_metadata(fmt=None, provenance=None) == {}


def test_the_format_and_the_origin_are_said() -> None:
    provenance = Provenance(dialect="quark", files=("q/a", "q/b"), has_fp8_weights=False)
    metadata = make_metadata(fmt=E4M3FNUZ, provenance=provenance)
    assert metadata["fp8calib.kv_cache_dtype"] == "float8_e4m3fnuz"
    assert json.loads(metadata["fp8calib.provenance"])["files"] == ["q/a", "q/b"]
    assert provenance.describe().startswith("scales of a quantized model (quark: q/a, q/b): ")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_file_of_scales_reads_back_in_its_format(tmp_path: Path, fmt: Fp8Format) -> None:
    path = tmp_path / "kv_scales.safetensors"
    write_kv_scales(compute_kv_scales(STATS, fmt), path)
    assert read_scales(path, STATS.geometry, needs_dtype=True).table.fmt is fmt
    assert find_recorded_format(TensorFile(path)) is fmt
    other = next(each for each in FORMATS if each is not fmt)
    with pytest.raises(VerificationError, match=f"for {fmt.name}, as is written there"):
        read_scales(path, STATS.geometry, source_dtype=other.name)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_an_overlay_names_the_format_that_its_config_does_not_mean(
    tmp_path: Path, fmt: Fp8Format
) -> None:
    source = save_source(STATS, tmp_path / "model")
    write_kv_overlay(compute_kv_scales(STATS, fmt), source, tmp_path / "out")
    shard = TensorFile(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert find_recorded_format(shard) is (None if fmt is E4M3FN else E4M3FNUZ)
    assert read_scales(tmp_path / "out", STATS.geometry, needs_dtype=True).table.fmt is fmt


@pytest.mark.parametrize("dtype", ["float8_e5m2", "e4m3fn", ""])
def test_a_format_that_kv_scales_are_not_for_is_refused(tmp_path: Path, dtype: str) -> None:
    path = _save(tmp_path / "a.safetensors", dtype)
    with pytest.raises(VerificationError, match=r"fp8calib\.kv_cache_dtype is '"):
        read_scales(path, STATS.geometry)


def test_config_and_file_may_not_differ(tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors", "float8_e4m3fnuz")
    config = {"model_type": "llama", "kv_cache_torch_dtype": "float8_e4m3fn"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VerificationError, match="several formats: e4m3fn, e4m3fnuz"):
        read_scales(tmp_path, STATS.geometry)


def test_foreign_metadata_says_nothing(tmp_path: Path) -> None:
    save_file(SCALES, tmp_path / "a.safetensors", metadata={"kv_cache_dtype": "float8_e4m3fnuz"})
    assert find_recorded_format(TensorFile(tmp_path / "a.safetensors")) is None
