"""Overlays of one-file and sharded sources, loaded by transformers and by safetensors."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.output import output_folder
from fp8calib.checkpoint.overlay import CARD_NAME, name_weights, write_overlay
from fp8calib.errors import ExportError

INDEX = "model.safetensors.index.json"
KV_CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "ignore": ["re:.*"],
        "config_groups": {
            "group_0": {
                "targets": ["re:^no-module$"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            }
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
}
# One element, not 0-dim: compressed-tensors 0.20 under transformers 5.23 refuses shape [] for [1].
SCALES = {
    f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([0.25 + layer + (part == "v") / 2])
    for layer in range(2)
    for part in "kv"
}
SIDE_FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "modeling_tiny.py": "x = 1",
    "LICENSE": "Apache",
    "cl100k.tiktoken": "a",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}
LEFT_OUT = ["pytorch_model.bin", "model.gguf", "tf_model.h5", "pytorch_model.bin.index.json"]


@pytest.fixture(params=["one file", "sharded"])
def source_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Save a tiny Llama with everything a real folder has around its weights."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path / "model"
    size = "4KB" if request.param == "sharded" else "1GB"
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "additional_chat_templates").mkdir()
    uncopied = dict.fromkeys([*LEFT_OUT, ".hidden", CARD_NAME], "x")
    for name, text in {**SIDE_FILES, **uncopied}.items():
        (folder / name).write_text(text)
    (folder / "onnx").mkdir()
    return folder


def _write(folder: Path, destination: Path) -> dict[str, str]:
    with Checkpoint.open(folder) as source:
        skipped, _ = write_overlay(
            source,
            destination,
            scales=SCALES,
            config_updates={**KV_CONFIG, "dtype": "bfloat16"},
        )
    return skipped


def _read_index(folder: Path) -> dict[str, dict[str, object]]:
    index: dict[str, dict[str, object]] = json.loads((folder / INDEX).read_text())
    return index


@pytest.mark.parametrize("source_folder", ["sharded"], indirect=True)
def test_a_sharded_source_keeps_its_names_order_and_metadata(
    tmp_path: Path, source_folder: Path
) -> None:
    before = _read_index(source_folder)
    before["metadata"] |= {"total_parameters": 5, "note": "kept"}
    (source_folder / INDEX).write_text(json.dumps(before))
    destination = tmp_path / "overlay"
    _write(source_folder, destination)

    after = _read_index(destination)
    names = list(after["weight_map"].items())
    assert names[: len(before["weight_map"])] == list(before["weight_map"].items())
    assert names[len(before["weight_map"]) :] == [
        (name, "model-kv-scales.safetensors") for name in sorted(SCALES)
    ]
    assert not (destination / "model.safetensors").exists()
    total = before["metadata"]["total_size"]
    assert isinstance(total, int)
    assert after["metadata"] == {"total_parameters": 5, "note": "kept", "total_size": total + 16}


@pytest.mark.parametrize("source_folder", ["sharded"], indirect=True)
def test_the_shard_of_scales_never_takes_a_name_in_use(tmp_path: Path, source_folder: Path) -> None:
    index = _read_index(source_folder)
    first = sorted(str(name) for name in index["weight_map"].values())[0]
    taken = "model-kv-scales.safetensors"
    (source_folder / first).rename(source_folder / taken)
    renamed = {name: taken if at == first else at for name, at in index["weight_map"].items()}
    (source_folder / INDEX).write_text(json.dumps({"weight_map": renamed}))

    _write(source_folder, tmp_path / "overlay")

    after = _read_index(tmp_path / "overlay")["weight_map"]
    assert {after[name] for name in SCALES} == {"model-kv-scales-2.safetensors"}


def test_what_is_left_out_is_told_with_the_reason(source_folder: Path, tmp_path: Path) -> None:
    (source_folder / "consolidated.safetensors").write_bytes(b"")
    (source_folder / "link").symlink_to("nothing")
    for name in ("trace.log", "tokenizer.dat"):
        with (source_folder / name).open("wb") as file:
            file.truncate(100_000_001)

    skipped = _write(source_folder, tmp_path / "overlay")

    assert set(skipped) == {*LEFT_OUT, "onnx", "consolidated.safetensors", "link", "trace.log"}
    assert skipped["model.gguf"] == "belongs to other weights"
    assert skipped["trace.log"] == "larger than 100 MB"
    assert (tmp_path / "overlay" / "tokenizer.dat").stat().st_size == 100_000_001


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_weights_are_copied_where_links_are_impossible(
    source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    _write(source_folder, tmp_path / "overlay")

    with Checkpoint.open(source_folder) as source:
        for name, file in name_weights(source)[0].items():
            assert (tmp_path / "overlay" / name).read_bytes() == file.path.read_bytes()
            assert not (tmp_path / "overlay" / name).samefile(file.path)


def test_another_disk_gets_a_copy_and_a_full_one_is_told_before_copying(
    source_folder: Path, small_disk: Path
) -> None:
    _write(source_folder, small_disk / "overlay")
    with Checkpoint.open(small_disk / "overlay") as copy:
        assert set(SCALES) <= set(copy.tensors)

    with (source_folder / "notes.md").open("wb") as file:
        file.truncate(2_000_000)
    with (
        pytest.raises(ExportError, match=r"2\.0 MB are needed and"),
        output_folder(small_disk / "second", owned=frozenset()) as folder,
    ):
        _write(source_folder, folder)
    assert [path.name for path in small_disk.iterdir()] == ["overlay"]


def test_a_scale_the_source_already_has_is_refused(source_folder: Path, tmp_path: Path) -> None:
    """A listed shard may hide it from the index, too."""
    overlay, name = tmp_path / "overlay", "model.layers.0.self_attn.k_scale"
    _write(source_folder, overlay)

    with pytest.raises(ExportError, match=r"already has a tensor model\.layers\.0"):
        _write(overlay, tmp_path / "again")
    index = _read_index(overlay)
    del index["weight_map"][name]
    (overlay / INDEX).write_text(json.dumps(index))
    again = {"scales": {name: SCALES[name]}, "config_updates": {}}
    hidden = pytest.raises(ExportError, match="already has a tensor")
    with Checkpoint.open(overlay) as source, hidden:
        write_overlay(source, tmp_path / "again", **again)
    assert not (tmp_path / "again").exists()
