"""Checkpoints of one file and of several, read as safetensors reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.weight_index import find_weights
from fp8calib.errors import ModelError

INDEX = "model.safetensors.index.json"


def _save_sharded(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    save_file({"b": torch.ones(2, 3), "a": torch.zeros(4)}, folder / "one.safetensors")
    save_file({"c": torch.full((2,), 7, dtype=torch.int64)}, folder / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "one.safetensors"} | {
        "c": "two.safetensors"
    }
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_index_that_sends_a_tensor_to_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    _save_sharded(tmp_path, {"a": "two.safetensors", "c": "two.safetensors"})

    with pytest.raises(ModelError, match=r"the tensor 'a' is not in two\.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("method", ["read", "dtype", "file_of"])
def test_a_tensor_that_is_not_there_is_a_model_error(tmp_path: Path, method: str) -> None:
    with (
        Checkpoint.open(_save_sharded(tmp_path)) as checkpoint,
        pytest.raises(ModelError, match="no tensor 'lm_head'"),
    ):
        getattr(checkpoint, method)("lm_head")


@pytest.mark.parametrize("name", ["weights.safetensors", "model-00001-of-00001.safetensors"])
def test_a_single_file_of_another_name_is_taken(tmp_path: Path, name: str) -> None:
    for each in (name, "adapter_model.safetensors"):
        (tmp_path / each).touch()
    assert find_weights(tmp_path) == ((name,), None)
