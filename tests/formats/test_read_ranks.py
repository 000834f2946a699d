"""Rank files as TensorRT-LLM and AMMO write them, made by hand."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.read import FoundScales, has_kv_scales, read_scales
from fp8calib.numerics.formats import E4M3FNUZ
from tests.formats.handmade import make_attention, make_geometry, shared_stats

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


def _values(found: FoundScales) -> list[object]:
    return [scale.values.tolist() for scale in found.table.scales.values()]


def _refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_scales(path, TWO_LAYERS)
    assert caught.value.message.startswith(f"{path}")
    return caught.value.message


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("rank{}.safetensors", NAME),
        ("llama_tp2_rank{}.npz", AMMO_NAME),
        ("llama_tp2_rank{}.safetensors", AMMO_NAME),
    ],
)
def test_the_ranks_of_a_folder_become_the_elements_of_a_scale(
    tmp_path: Path, pattern: str, name: str
) -> None:
    _save(tmp_path / pattern.format(1), {0: 0.25, 1: 4.0}, name)
    _save(tmp_path / pattern.format(0), {1: 2.0, 0: 0.5}, name)
    found = read_scales(tmp_path, TWO_LAYERS)

    assert has_kv_scales(tmp_path)
    assert found.dialect == "trtllm"
    assert (found.table.tp, found.table.per_head, found.has_weights) == (2, False, False)
    assert _values(found) == [[0.5, 0.25], [0.5, 0.25], [2.0, 4.0], [2.0, 4.0]]
    assert found.notes == ("one scale per layer is used for both k and v",)


def test_ten_ranks_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for rank in range(11):
        _save(tmp_path / f"rank{rank}.npz", {0: rank + 1, 1: 1})
    first = _values(read_scales(tmp_path, TWO_LAYERS))[0]
    assert first == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ["llama.npz", "llama.safetensors", "rank0.npz"])
def test_a_file_that_is_alone_is_rank_0(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path / name, {0: 0.5, 1: 2.0})
    for place in (path, tmp_path):
        assert has_kv_scales(place)
        assert _values(read_scales(place, TWO_LAYERS)) == [[0.5], [0.5], [2.0], [2.0]]


def test_layers_that_share_a_cache_may_be_missing(tmp_path: Path) -> None:
    path = _save(tmp_path / "rank0.npz", {0: 0.5, 1: 2.0})
    values = _values(read_scales(path, shared_stats().geometry))
    assert values == [[0.5], [0.5], [2.0], [2.0], [2.0], [2.0], [0.5], [0.5]]


def test_the_source_dtype_is_the_format_of_the_table(tmp_path: Path) -> None:
    path = _save(tmp_path / "rank0.npz", {0: 0.5, 1: 2.0})
    found = read_scales(path, TWO_LAYERS, source_fmt=E4M3FNUZ)
    assert found.table.fmt is E4M3FNUZ
    assert _values(found)[0] == [0.5]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_missing_rank_is_named(tmp_path: Path, suffix: str) -> None:
    _save(tmp_path / f"rank1.{suffix}", {0: 1, 1: 1})
    _save(tmp_path / f"rank2.{suffix}", {0: 1, 1: 1})
    assert _refusal(tmp_path).endswith("rank 0 is missing; there is only ranks 1, 2")
    assert _refusal(tmp_path / f"rank1.{suffix}").endswith(
        "rank 0 is missing; there is only rank 1"
    )


def test_the_config_tells_how_many_ranks_there_are(tmp_path: Path) -> None:
    _save(tmp_path / "rank0.safetensors", {0: 1, 1: 1})
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "LlamaForCausalLM", "mapping": {"tp_size": 2}})
    )
    for place in (tmp_path, tmp_path / "rank0.safetensors"):
        assert _refusal(place).endswith(": only 1 of 2 rank files exist (0)")
    _save(tmp_path / "rank1.safetensors", {0: 1, 1: 1})
    assert read_scales(tmp_path, TWO_LAYERS).table.tp == 2


def test_int8_scales_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "rank0.safetensors", {0: 1, 1: 1})
    config = {"quantization": {"quant_algo": "W8A16", "kv_cache_quant_algo": "INT8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _refusal(tmp_path).endswith("kv_cache_quant_algo is 'INT8', not FP8")


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "rank0.npz", {0: 1, 1: 1})
    _save(tmp_path / "rank0.safetensors", {0: 1, 1: 1})
    assert "two files of rank 0 (rank0.npz, rank0.safetensors)" in _refusal(tmp_path)


def test_files_without_a_rank_are_refused_beside_others(tmp_path: Path) -> None:
    _save(tmp_path / "rank0.npz", {0: 1, 1: 1})
    _save(tmp_path / "second.npz", {0: 1, 1: 1})
    assert _refusal(tmp_path).endswith("second.npz: no rank in the file's name")


def test_a_name_with_two_ranks_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "rank0_of_rank1.npz", {0: 1, 1: 1})
    assert _refusal(path).endswith("several ranks (0, 1) in the file's name")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_layer_is_the_one_number_in_the_name(tmp_path: Path, suffix: str) -> None:
    for name in (
        "kv_cache_scaling_factor",
        "a.0.b.1.kv_cache_scaling_factor",
        "a.b0.kv_cache_scaling_factor",
        f"a.{'1' * 5000}.kv_cache_scaling_factor",
    ):
        path = _save(tmp_path / f"rank0.{suffix}", {0: 1}, name)
        assert _refusal(path).endswith(f"{name[:200]}: the name does not contain one layer number")


def test_two_scales_for_a_layer_are_refused(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "rank0.npz",
        **{NAME.format(0): np.float32(1), AMMO_NAME.format(0): np.float32(1)},
    )
    assert _refusal(tmp_path).endswith("kv_cache_scaling_factor: a second scale for layer 0")


def test_missing_and_extra_layers_are_named(tmp_path: Path) -> None:
    path = _save(tmp_path / "rank0.npz", {1: 1})
    assert _refusal(path).endswith("there is no KV scale for layer 0 (1 of 2 are missing)")
    path = _save(tmp_path / "rank0.npz", {0: 1, 1: 1, 2: 1, 7: 1})
    assert _refusal(path).endswith("there are scales for layers 2, 7, but the model has 2 layers")


def test_ranks_with_different_layers_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "rank0.npz", {0: 1, 1: 1})
    _save(tmp_path / "rank1.npz", {0: 1})
    assert _refusal(tmp_path).endswith("layer 1: in only one of rank 0 and rank 1")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_scale_that_is_too_small_is_refused(tmp_path: Path, suffix: str) -> None:
    path = _save(tmp_path / f"rank0.{suffix}", {0: 1, 1: 1e-40})
    assert _refusal(path).endswith(f"{NAME.format(1)}: 1e-40 is too small for a scale")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_scale_that_fp16_has_not_kept_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rank0.{suffix}"
    arrays = {NAME.format(layer): np.array([6e-8], dtype=np.float16) for layer in range(2)}
    if suffix == "npz":
        np.savez(path, **arrays)
    else:
        save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    assert _refusal(path).endswith(f"{NAME.format(0)}: 5.96e-08 is too small for a scale in fp16")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_finite_and_above_zero(tmp_path: Path, suffix: str, value: float) -> None:
    path = _save(tmp_path / f"rank0.{suffix}", {0: 1, 1: value})
    assert _refusal(path).endswith(f"{NAME.format(1)}: {value} is not a scale")


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.ones(2), "F32 of shape [2]"),
        (torch.ones(1, 1), "F32 of shape [1, 1]"),
        (torch.ones(1, dtype=torch.int32), "I32 of shape [1]"),
    ],
)
def test_tensors_that_are_not_one_float_are_refused(
    tmp_path: Path, tensor: torch.Tensor, shown: str
) -> None:
    save_file({NAME.format(0): tensor}, tmp_path / "rank0.safetensors")
    assert _refusal(tmp_path / "rank0.safetensors").endswith(f"{NAME.format(0)} is {shown}")


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.ones(2, np.float32), "float32 of shape [2]"),
        (np.ones((), np.int64), "int64 of shape []"),
        (np.array("1.0"), "<U3 of shape []"),
    ],
)
def test_arrays_that_are_not_one_float_are_refused(
    tmp_path: Path, array: np.ndarray, shown: str
) -> None:
    np.savez(tmp_path / "rank0.npz", **{NAME.format(0): array})
    assert _refusal(tmp_path / "rank0.npz").endswith(f"{NAME.format(0)} is {shown}")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.dtype(">f4")])
def test_arrays_of_any_float_are_read(tmp_path: Path, dtype: np.dtype) -> None:
    arrays = {NAME.format(layer): np.array([[0.5]], dtype) for layer in range(2)}
    np.savez_compressed(tmp_path / "rank0.npz", **arrays)
    assert _values(read_scales(tmp_path, TWO_LAYERS))[0] == [0.5]


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "rank0.npz", **{NAME.format(0): np.array([_Bomb()], dtype=object)})
    assert _refusal(tmp_path / "rank0.npz").endswith("when allow_pickle=False")
    (tmp_path / "rank1.npz").write_bytes(pickle.dumps(_Bomb()))
    assert "not a readable .npz archive" in _refusal(tmp_path / "rank1.npz")


def test_huge_arrays_are_not_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "rank0.npz", **{NAME.format(0): np.zeros(1 << 20, np.float32)})
    assert "bytes are too many for one number" in _refusal(tmp_path / "rank0.npz")


@pytest.mark.parametrize("cut", [0, 10, 100, -30])
def test_a_truncated_archive_is_refused(tmp_path: Path, cut: int) -> None:
    path = _save(tmp_path / "rank0.npz", {0: 1, 1: 1})
    path.write_bytes(path.read_bytes()[:cut])
    assert "not a readable .npz archive" in _refusal(path)
    with pytest.raises(ModelError, match=r"not a readable \.npz archive"):
        has_kv_scales(path)


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "rank0.npz", {0: 1, 1: 1})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\x93NUMPY") + 20] ^= 0xFF
    path.write_bytes(raw)
    assert "cannot be read" in _refusal(path)


def _save_member(path: Path, raw: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{NAME.format(0)}.npy", raw)
    return path


def _npy(version: tuple[int, int]) -> bytes:
    target = io.BytesIO()
    np.lib.format.write_array(target, np.ones(1, np.float32), version=version)
    return target.getvalue()


def test_an_array_without_its_number_is_refused(tmp_path: Path) -> None:
    path = _save_member(tmp_path / "rank0.npz", _npy((1, 0))[:-2])
    assert f"{NAME.format(0)}: cannot be read" in _refusal(path)


def test_the_versions_of_arrays_that_numpy_writes_for_numbers_are_read(tmp_path: Path) -> None:
    geometry = make_geometry([make_attention(0)])
    for version in ((1, 0), (2, 0), (3, 0)):
        path = _save_member(tmp_path / "rank0.npz", _npy(version))
        assert _values(read_scales(path, geometry)) == [[1.0], [1.0]]
