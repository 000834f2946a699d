"""Checkpoints of one file and of several, read as safetensors reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint, UnlistedTensor
from fp8calib.errors import ModelError
from tests.checkpoint.handmade import GOLDEN_FILE

INDEX = "model.safetensors.index.json"


def _save_sharded(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    save_file({"b": torch.ones(2, 3), "a": torch.zeros(4)}, folder / "one.safetensors")
    save_file({"c": torch.full((2,), 7, dtype=torch.int64)}, folder / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "one.safetensors"} | {
        "c": "two.safetensors"
    }
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_one_file_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOLDEN_FILE)

    with Checkpoint.open(tmp_path) as checkpoint:
        assert not checkpoint.is_sharded
        assert checkpoint.weight_files == (tmp_path / "model.safetensors",)
        assert list(checkpoint.tensors) == ["a", "b", "none", "scalar", "bytes"]
        assert checkpoint.total_size_bytes == 29
        assert checkpoint.read("a").tolist() == [1.0, -2.5, 448.0]
        assert checkpoint.read_rows("b", 1, 2).tolist() == [[2.0, 0.5]]
        for size_bytes, expected in ((0, []), (1, [30]), (2, [20, 30]), (9, [10, 20, 30, 40, 50])):
            assert checkpoint.sample_bytes("bytes", size_bytes) == bytes(expected)
        assert (checkpoint.dtype("b"), checkpoint.tensors["b"].shape) == (torch.bfloat16, (2, 2))
        assert "a" in checkpoint
        assert "z" not in checkpoint


def test_an_index_that_sends_a_tensor_to_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    _save_sharded(tmp_path, {"a": "two.safetensors", "c": "two.safetensors"})

    with pytest.raises(ModelError, match=r"the tensor 'a' is not in two\.safetensors"):
        Checkpoint.open(tmp_path)


def test_what_the_index_does_not_name_is_unlisted_and_not_read(tmp_path: Path) -> None:
    _save_sharded(tmp_path, {"a": "one.safetensors", "c": "two.safetensors"})
    save_file({"a": torch.ones(4), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    save_file({"z": torch.ones(1)}, tmp_path / "consolidated.safetensors")

    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "c"}
        assert set(checkpoint.unlisted) == {
            UnlistedTensor("one.safetensors", "b"),
            UnlistedTensor("two.safetensors", "a"),
        }
        assert [path.name for path in checkpoint.weight_files] == [
            "one.safetensors",
            "two.safetensors",
        ]
        assert checkpoint.read("a").tolist() == [0.0] * 4


@pytest.mark.parametrize("method", ["read", "dtype", "file_of"])
def test_a_tensor_that_is_not_there_is_a_model_error(tmp_path: Path, method: str) -> None:
    with (
        Checkpoint.open(_save_sharded(tmp_path)) as checkpoint,
        pytest.raises(ModelError, match="no tensor 'lm_head'"),
    ):
        getattr(checkpoint, method)("lm_head")


def test_a_config_keeps_the_order_of_its_keys(tmp_path: Path) -> None:
    (_save_sharded(tmp_path) / "config.json").write_text('{"z": 1, "a": Infinity}')

    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.load_config().items()) == [("z", 1), ("a", float("inf"))]
