"""Quantized checkpoints that are decoded while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8calib.quantization.sources.decoded import open_model
from tests.cli.quantized_children import change_tensors, save_child, save_int

NAME = "model.layers.1.mlp.down_proj.weight"
CHANNELS = "compressed-tensors"


@pytest.mark.parametrize("form", ["fp8", "blocks", "int8", "int4", "int4, groups"])
def test_parts_are_parts_of_the_whole(tmp_path: Path, form: str) -> None:
    child = tmp_path / "child"
    if form in ("fp8", "blocks"):
        save_child({"fp8": CHANNELS, "blocks": "autofp8"}[form], child)
    else:
        save_int(child, 8 if form == "int8" else 4, group=32 if "groups" in form else None)
    with open_model(child, if_quantized="") as opened:
        whole = opened.read(NAME)
        assert whole.dtype is opened.dtype(NAME) is torch.bfloat16
        entry = opened.tensors[NAME]
        assert (entry.dtype, entry.shape) == ("BF16", tuple(whole.shape))
        assert torch.equal(opened.read_rows(NAME, 5, 9), whole[5:9])
        assert torch.equal(opened.read_as_mapped(NAME), whole)
        raw = whole.view(torch.uint8).reshape(-1)
        assert torch.equal(opened.read_bytes(NAME, 101, 777), raw[101:777])
        middle = (raw.numel() - 64) // 2
        assert opened.sample_bytes(NAME, 64) == raw[middle : middle + 64].numpy().tobytes()
        assert NAME in opened
        assert not any(name.endswith(("_scale", "_packed", "_shape")) for name in opened.tensors)
        assert any(name.endswith("_scale") or "scale_inv" in name for name in opened.stored.tensors)
        assert "quantization_config" not in opened.load_config()
        assert "quantization_config" in opened.stored.load_config()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_compressed_tensors(tmp_path: Path, bits: int) -> None:
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    child = save_int(tmp_path / "child", 4, group=32)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (32, 160), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1])
    module = NAME.removesuffix(".weight")
    scale = torch.rand(32, 5).to(torch.bfloat16)
    change_tensors(
        child,
        lambda tensors: {
            **tensors,
            f"{module}.weight_packed": packed.pack_to_int32(codes, bits),
            f"{module}.weight_scale": scale,
        },
    )
    with open_model(child, if_quantized="") as opened:
        values = opened.read(NAME)
    expected = codes.float() * scale.float().repeat_interleave(32, 1)
    assert torch.equal(values, expected.to(torch.bfloat16))
