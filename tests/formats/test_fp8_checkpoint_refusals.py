"""A fault in an FP8 checkpoint is one error that names the file and the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import require_format
from tests.formats.fp8_handmade import (
    AUTOFP8_DYNAMIC,
    CASES,
    CT_BLOCK,
    CT_CHANNEL,
    CT_STATIC,
    LINEAR,
    Tensors,
    find_config,
    linear,
    make_tensors,
    save,
    scalar,
)

WEIGHT = f"{LINEAR}.weight"
SCALE = f"{LINEAR}.weight_scale"
HALF = scalar(0.5)


def _read_all(folder: Path, *, fuse: bool = True) -> None:
    with Fp8Checkpoint.open(folder, fuse=fuse) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)
            if name in checkpoint.quantized:
                checkpoint.weight_scale(name)
                checkpoint.activation(name)


def _refuse(folder: Path, tensors: Tensors, config: object) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _read_all(save(folder, tensors, config))
    assert caught.value.message.startswith(str(folder))
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("config", [CT_STATIC, CT_CHANNEL, CT_BLOCK])
def test_a_config_of_compressed_tensors_without_a_format_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    groups = {
        name: {key: value for key, value in item.items() if key != "format"}
        for name, item in config["config_groups"].items()
    }
    bare = {key: value for key, value in config.items() if key != "format"}
    require_format(tmp_path, {"quantization_config": config})
    require_format(tmp_path, {"quantization_config": bare})
    require_format(tmp_path, {"quantization_config": config | {"config_groups": groups}})
    with pytest.raises(ModelError, match="'group_0' of config_groups has no format"):
        require_format(tmp_path, {"quantization_config": bare | {"config_groups": groups}})


def test_a_scale_lost_in_fp16_says_so(tmp_path: Path) -> None:
    tensors = linear(scale=scalar(1e-8).to(torch.float16))
    assert "fp16" in _refuse(tmp_path, tensors, AUTOFP8_DYNAMIC).hint


def test_a_scale_that_the_index_leaves_out_is_found_for_the_user(tmp_path: Path) -> None:
    save(tmp_path, linear(), AUTOFP8_DYNAMIC)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    second = {SCALE: HALF, "model.norm.weight": torch.ones(2)}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    shards = {
        WEIGHT: "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="weight_scale") as caught:
        Fp8Checkpoint.open(tmp_path, fuse=False)
    assert "model-00002-of-00002.safetensors, but not in the index" in caught.value.hint


@pytest.mark.parametrize("case", CASES["refused"])
def test_a_fault_is_refused_by_name(tmp_path: Path, case: str) -> None:
    row = CASES["refused"][case]
    error = _refuse(tmp_path, make_tensors(row["tensors"]), find_config(row["config"]))
    assert row["says"] in error.message
    assert error.hint or not row.get("hint")


def test_a_tensor_that_is_not_there_or_not_fp8_is_named(tmp_path: Path) -> None:
    tensors = linear(scale=HALF) | {"model.norm.weight": torch.ones(2)}
    checkpoint = Fp8Checkpoint.open(save(tmp_path, tensors, AUTOFP8_DYNAMIC), fuse=False)
    readers: tuple[Callable[[str], object], ...] = (
        checkpoint.read,
        checkpoint.dtype,
        checkpoint.weight_scale,
        checkpoint.activation,
        lambda name: checkpoint.read_rows(name, 0, 1),
    )
    for read in readers:
        for name in ("model.nowhere.weight", SCALE):
            with pytest.raises(ModelError, match=name):
                read(name)
    for read in (checkpoint.weight_scale, checkpoint.activation):
        with pytest.raises(ModelError, match=r"model\.norm\.weight"):
            read("model.norm.weight")
