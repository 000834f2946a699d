"""The weight files and index of a folder, and the errors for a folder without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8calib.checkpoint.weight_index import find_weights, read_index
from fp8calib.errors import ModelError

INDEX = "model.safetensors.index.json"


def _touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def _write_index(folder: Path, document: object) -> Path:
    path = folder / INDEX
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return path


@pytest.mark.parametrize("name", ["weights.safetensors", "model-00001-of-00001.safetensors"])
def test_a_single_file_of_another_name_is_taken(tmp_path: Path, name: str) -> None:
    assert find_weights(_touch(tmp_path, name, "adapter_model.safetensors")) == ((name,), None)


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["a.safetensors", "b.safetensors"],
    ],
)
def test_parts_without_an_index_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ModelError, match=f"{INDEX} is missing"):
        find_weights(_touch(tmp_path, *names))


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        ([], "there are no *.safetensors weights", "expected"),
        (["config.json"], "no *.safetensors weights", "model.safetensors"),
        (["config.json", "training_args.bin"], "no *.safetensors weights", "model.safetensors"),
        (["pytorch_model.bin"], "pickled (pytorch_model.bin)", "save_pretrained"),
        (["a.bin", "b.bin", "c.bin", "d.bin"], "a.bin, b.bin, c.bin and 1 more", "save_pretrained"),
        (["consolidated.00.pth"], "pickled (consolidated.00.pth)", "save_pretrained"),
        (["model.pt"], "pickled (model.pt)", "save_pretrained"),
        (["model-Q8.gguf"], "GGUF (model-Q8.gguf)", "safetensors"),
        (["adapter_model.safetensors"], "an adapter", "merge"),
    ],
)
def test_a_folder_without_weights_is_told_what_it_holds_instead(
    tmp_path: Path, names: list[str], message: str, hint: str
) -> None:
    with pytest.raises(ModelError) as caught:
        find_weights(_touch(tmp_path, *names))

    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert hint in caught.value.hint


def test_a_missing_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no model folder: No such file"):
        find_weights(tmp_path / "missing")
    with pytest.raises(ModelError, match="is no model folder: Not a directory"):
        find_weights(_touch(tmp_path, "x") / "x")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff{}", "cannot be read as JSON"),
        (b"[" * 200_000, "nested too deeply"),
        ([], "not a JSON object"),
        ({}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": ["a.safetensors"]}, "no weight_map"),
        (b'{"weight_map":{"x":"a.safetensors","x":"b.safetensors"}}', "'x' occurs twice"),
        ({"weight_map": {"x": 1}}, "tensor 'x' is mapped to 1"),
        ({"weight_map": {"x": "/etc/a.safetensors"}}, "is mapped to '/etc/a.safetensors'"),
        ({"weight_map": {"x": "../a.safetensors"}}, "is mapped to '../a.safetensors'"),
        ({"weight_map": {"x": "sub/a.safetensors"}}, "is mapped to 'sub/a.safetensors'"),
        ({"weight_map": {"x": "..\\a.safetensors"}}, "is mapped to"),
        ({"weight_map": {"x": "a\0.safetensors"}}, "is mapped to"),
        ({"weight_map": {"x": ".safetensors"}}, "is mapped to"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "is mapped to 'pytorch_model.bin'"),
    ],
)
def test_a_broken_index_is_a_model_error(tmp_path: Path, document: object, message: str) -> None:
    path = _write_index(tmp_path, document)

    with pytest.raises(ModelError) as caught:
        read_index(path)

    assert message in caught.value.message
    assert str(path) in caught.value.message
