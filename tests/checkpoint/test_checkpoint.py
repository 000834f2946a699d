"""Checkpoints of one file and of several, read as safetensors reads them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from fp8calib.checkpoint.checkpoint import Checkpoint, read_quantization
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.locations import refuse_external_links
from fp8calib.checkpoint.tensor_file import TensorFile, save_tensors
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.checkpoint.weight_index import find_weights
from fp8calib.errors import ExportError, ModelError
from fp8calib.numerics.encode import decode_scale
from tests.checkpoint.handmade import GOLDEN_FILE, describe, pack

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


@pytest.mark.parametrize("method", ["read", "dtype"])
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


def test_golden_bytes_become_the_numbers_they_mean(golden_path: Path) -> None:
    with TensorFile(golden_path) as file:
        assert file.read("a").tolist() == [1.0, -2.5, 448.0]
        assert file.read("b").tolist() == [[1.0, -1.0], [2.0, 0.5]]
        assert file.read("bytes").tolist() == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_what_safetensors_writes_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    save_file({"x": tensor.reshape(2, -1), "odd": raw[:3].clone()}, tmp_path / "x.safetensors")

    with TensorFile(tmp_path / "x.safetensors") as file:
        read = file.read("x")

    assert (read.dtype, read.shape) == (dtype, tensor.reshape(2, -1).shape)
    assert read.view(torch.uint8).equal(tensor.reshape(2, -1).view(torch.uint8))


def test_numbers_of_less_than_a_byte_are_listed_and_not_read(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[1,4],"data_offsets":[0,2]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))

    with TensorFile(path) as file:
        assert list(file.tensors) == ["x"]
        for read in (lambda: file.read("x"), lambda: file.read_rows("x", 0, 1)):
            with pytest.raises(
                ModelError, match="x is F4, smaller than a byte, and cannot be read"
            ):
                read()


def test_rows_are_slices_of_the_leading_dimension(golden_path: Path) -> None:
    with TensorFile(golden_path) as file:
        assert file.read_rows("b", 1, 2).tolist() == [[2.0, 0.5]]
        assert file.read_rows("a", 1, 3).tolist() == [-2.5, 448.0]
        assert file.read_rows("b", 1, 1).shape == (0, 2)
        assert file.read_rows("none", 0, 0).shape == (0, 7)


@pytest.mark.parametrize(
    ("name", "start", "stop"), [("a", 0, 4), ("a", -1, 2), ("a", 2, 1), ("scalar", 0, 1)]
)
def test_rows_a_tensor_does_not_have_are_an_index_error(
    golden_path: Path, name: str, start: int, stop: int
) -> None:
    with TensorFile(golden_path) as file, pytest.raises(IndexError):
        file.read_rows(name, start, stop)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (range(4), range(5)),
        (range(1, 3), range(5)),
        (range(4), range(2, 5)),
        (range(3, 4), range(1)),
    ],
)
def test_a_slab_is_a_part_of_one_matrix(tmp_path: Path, rows: range, columns: range) -> None:
    tensor = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5)
    save_file({"before": tensor[0].clone(), "x": tensor}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        for index in range(3):
            found = file.read_block("x", index, rows, columns)
            expected = tensor[index, rows.start : rows.stop, columns.start : columns.stop]
            assert (found.dtype, found.tolist()) == (torch.bfloat16, expected.tolist())


def test_a_file_that_shrinks_while_open_is_a_model_error(golden_path: Path) -> None:
    with TensorFile(golden_path) as file:
        file.read("a")
        os.truncate(golden_path, len(GOLDEN_FILE) - 2)
        with pytest.raises(ModelError, match="was truncated"):
            file.read("bytes")


def test_reading_a_file_does_not_add_its_pages_to_the_process(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({f"t{number}": torch.ones(2_000_000) for number in range(15)}, path)
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from fp8calib.checkpoint.tensor_file import TensorFile\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "file = TensorFile(Path(sys.argv[1])); before = peak()\n"
        "for name in file.tensors: file.read(name)\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert path.stat().st_size > 120_000_000
    assert int(done.stdout) < 60  # MiB: one tensor has 8 MB, all have 120 MB


SCALES = {
    "model.layers.1.self_attn.k_scale": torch.tensor(0.25),
    "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
    "heads": torch.tensor([1.0, 2.0]).reshape(2, 1, 1),
    "weight": torch.ones(3, 2).to(torch.float8_e4m3fn),
}


def test_saving_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", SCALES, metadata={"format": "pt"})
    save_tensors(tmp_path / "b", dict(reversed(SCALES.items())), metadata={"format": "pt"})
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_tensors_that_share_memory_are_saved_each_for_itself(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    shared = {"k": base, "v": base, "part": base[2:4], "rows": base.reshape(2, 3).T, "e": base[:0]}
    save_tensors(tmp_path / "x", {**shared, "wide": base[:1].expand(3)}, metadata={})

    stored = load((tmp_path / "x").read_bytes())
    assert all(stored[name].equal(tensor) for name, tensor in shared.items())
    assert stored["wide"].tolist() == [0.0, 0.0, 0.0]


def test_a_full_disk_is_an_export_error_that_leaves_nothing(small_disk: Path) -> None:
    with pytest.raises(ExportError) as caught:
        save_tensors(small_disk / "x", {"x": torch.ones(500_000)}, metadata={})

    assert str(small_disk / "x") in caught.value.message
    assert "2.0 MB are needed" in caught.value.message
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_floats_without_torch_are_those_that_torch_makes(tmp_path: Path, name: str) -> None:
    dtype = TORCH_DTYPES[name]
    raw = torch.arange(256, dtype=torch.uint8).repeat(256)
    raw[1::2] = raw[::256].repeat_interleave(len(raw) // 512)  # all codes of 16 bits, and more
    tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    save_file({"x": tensor.reshape(2, -1)}, tmp_path / "x.safetensors")

    with TensorFile(tmp_path / "x.safetensors") as file:
        floats, scale = file.read_floats("x"), file.read_floats("x", of_scale=True)
        stored = file.read("x")

    expected = (stored.real if stored.is_complex() else stored).to(torch.float32).numpy()
    np.testing.assert_array_equal(floats, expected)
    np.testing.assert_array_equal(scale, decode_scale(stored).numpy())


BROKEN = {
    "deep nesting": (pack(b'{"a":' + b"[" * 200_000), "recursion limit"),
    "huge integer": (pack(b'{"a":' + b"9" * 9000 + b"}"), "number out of range"),
    "overflowing shape": (
        pack({"a": describe("F32", [10**18] * 1000, 0, 4)}, bytes(4)),
        "overflow",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_a_model_error_that_names_file_and_fault(
    tmp_path: Path, fault: str
) -> None:
    raw, expected = BROKEN[fault]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert expected in caught.value.message
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 700 + len(str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return made


@pytest.mark.parametrize("name", ["a.safetensors", "config.json", "rank0.npz"])
@pytest.mark.parametrize("target", ["../secret", "{tmp}/secret", "../model-2/secret"])
def test_a_link_to_a_file_elsewhere_is_refused(
    tmp_path: Path, folder: Path, name: str, target: str
) -> None:
    (tmp_path / "model-2").mkdir()
    for place in (tmp_path, tmp_path / "model-2"):
        (place / "secret").write_text("x")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target.format(tmp=tmp_path))

    with pytest.raises(ModelError, match=f"{name} is a link out of the folder") as refused:
        refuse_external_links(folder)
    assert "hard-link" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "dtype", "is_quantized"),
    [
        ("up_proj.weight", torch.float8_e4m3fn, True),
        ("up_proj.weight_packed", torch.int32, True),
        ("up_proj.qweight", torch.int32, True),
        ("up_proj.weight", torch.bfloat16, False),
    ],
)
def test_codes_without_a_quantization_config_are_refused(
    tmp_path: Path, name: str, dtype: torch.dtype, is_quantized: bool
) -> None:
    save_file({name: torch.ones(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        if not is_quantized:
            assert read_quantization(checkpoint) is None
            return
        with pytest.raises(ModelError, match=f"{name} is quantized, but config.json has no"):
            read_quantization(checkpoint)
