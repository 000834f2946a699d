"""Rank files as TensorRT-LLM and AMMO write them, made by hand."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.read import read_scales
from tests.formats.handmade import make_attention, make_geometry

TWO_LAYERS = make_geometry([make_attention(0), make_attention(1)])
NAME = "transformer.layers.{}.attention.kv_cache_scaling_factor"
AMMO_NAME = "layers.{}.attention.qkv.kv_cache_scaling_factor"


def _save(path: Path, scales: Mapping[int, float], name: str = NAME) -> Path:
    """Save a rank file of either kind, with another tensor in it."""
    arrays = {name.format(layer): np.array([scale], np.float32) for layer, scale in scales.items()}
    arrays["transformer.layers.0.mlp.fc.weights_scaling_factor"] = np.ones(1, np.float32)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file({key: torch.from_numpy(array) for key, array in arrays.items()}, path)
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_scales(path, TWO_LAYERS)
    assert caught.value.message.startswith(f"{path}")
    return caught.value.message


SUFFIXES = ("npz", "safetensors")
ONES = {0: 1.0, 1: 1.0}
REFUSED: list[tuple[dict[str, dict[int, float]], str]] = [
    *(
        (
            {f"rank{rank}.{suffix}": ONES for rank in ranks},
            f"rank 0 is missing; there is only {said}",
        )
        for suffix in SUFFIXES
        for ranks, said in (((1, 2), "ranks 1, 2"), ((1,), "rank 1"))
    ),
    ({"rank0.npz": ONES, "rank0.safetensors": ONES}, "two files of rank 0 (rank0.npz, rank0.safe"),
    ({"rank0.npz": ONES, "second.npz": ONES}, "second.npz: no rank in the file's name"),
    ({"rank0_of_rank1.npz": ONES}, "several ranks (0, 1) in the file's name"),
    ({"rank0.npz": {1: 1}}, "there is no KV scale for layer 0 (1 of 2 are missing)"),
    (
        {"rank0.npz": ONES | {2: 1, 7: 1}},
        "there are scales for layers 2, 7, but the model has 2 layers",
    ),
    ({"rank0.npz": ONES, "rank1.npz": {0: 1}}, "layer 1: in only one of rank 0 and rank 1"),
    *(
        ({f"rank0.{suffix}": {0: 1, 1: value}}, f"{NAME.format(1)}: {value} is {why}")
        for suffix in SUFFIXES
        for value, why in (
            (1e-40, "too small for a scale"),
            *((value, "not a scale") for value in (0.0, -1.0, float("nan"), float("inf"))),
        )
    ),
]
"""Files with the scales of layers, and what the message has."""


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_what_ranks_cannot_be_is_refused(
    tmp_path: Path, files: dict[str, dict[int, float]], message: str
) -> None:
    for name, scales in files.items():
        _save(tmp_path / name, scales)
    assert message in _refusal(tmp_path)


def test_the_config_tells_the_number_of_ranks_and_the_format(tmp_path: Path) -> None:
    path, config = _save(tmp_path / "rank0.safetensors", ONES), tmp_path / "config.json"
    config.write_text(json.dumps({"mapping": {"tp_size": 2}}))
    for place in (tmp_path, path):
        assert _refusal(place).endswith(": only 1 of 2 rank files exist (0)")
    _save(tmp_path / "rank1.safetensors", ONES)
    assert read_scales(tmp_path, TWO_LAYERS).table.tp == 2
    config.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "INT8"}}))
    assert _refusal(tmp_path).endswith("kv_cache_quant_algo is 'INT8', not FP8")


NO_LAYER = "the name does not contain one layer number"
ARRAYS: list[tuple[dict[str, np.ndarray], str]] = [
    *(
        ({name: np.ones(1, np.float32)}, f"{name[:200]}: {NO_LAYER}")
        for name in (
            *("kv_cache_scaling_factor", "a.0.b.1.kv_cache_scaling_factor"),
            *("a.b0.kv_cache_scaling_factor", f"a.{'1' * 5000}.kv_cache_scaling_factor"),
        )
    ),
    (
        {name.format(0): np.ones(1, np.float32) for name in (NAME, AMMO_NAME)},
        "kv_cache_scaling_factor: a second scale for layer 0",
    ),
    (
        {NAME.format(layer): np.array([6e-8], np.float16) for layer in range(2)},
        f"{NAME.format(0)}: 5.96e-08 is too small for a scale in fp16",
    ),
    *(
        ({NAME.format(0): array}, f"{NAME.format(0)} is {{}} of shape {list(array.shape)}")
        for array in (np.ones(2, np.float32), np.ones((1, 1), np.int64), np.array("1.0"))
    ),
]
"""Arrays of a file, and how the message ends: {} is the kind of their numbers."""
KINDS = {"float32": "F32", "int64": "I64"}


@pytest.mark.parametrize(("arrays", "message"), ARRAYS)
def test_arrays_that_are_not_one_number_of_one_layer_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    kind = str(next(iter(arrays.values())).dtype)
    np.savez(tmp_path / "rank0.npz", **arrays)
    assert _refusal(tmp_path / "rank0.npz").endswith(message.format(kind))
    if kind != "<U3":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        save_file(tensors, tmp_path / "rank0.safetensors")
        said = message.format(KINDS.get(kind))
        assert _refusal(tmp_path / "rank0.safetensors").endswith(said)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "rank0.npz", **{NAME.format(0): np.array([_Bomb()], dtype=object)})
    assert _refusal(tmp_path / "rank0.npz").endswith("when allow_pickle=False")
    (tmp_path / "rank1.npz").write_bytes(pickle.dumps(_Bomb()))
    assert "not a readable .npz archive" in _refusal(tmp_path / "rank1.npz")
