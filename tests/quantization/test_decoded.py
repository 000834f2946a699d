"""Quantized checkpoints that are decoded while they are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.errors import ModelError
from fp8calib.quantization.sources.decoded import open_model
from tests.cli.quantized_children import BASE, change_tensors, save_child, save_fp4, save_int

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


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "modelopt"])
def test_fp4_is_what_compressed_tensors_decodes(tmp_path: Path, form: str) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    mx = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    child = save_fp4(tmp_path / "child", form)
    stored = load_file(child / "model.safetensors")
    module = NAME.removesuffix(".weight")
    packed = stored[NAME if form == "modelopt" else f"{module}.weight_packed"]
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    values = helpers.unpack_fp4_from_uint8(packed, rows, columns, torch.float32)
    scale = stored[f"{module}.weight_scale"]
    if form == "mxfp4":
        scale = mx.decompress_mx_scale(scale).float()
    elif form == "nvfp4":
        scale = scale.float() / stored[f"{module}.weight_global_scale"]
    else:
        scale = scale.float() * stored[f"{module}.weight_scale_2"]
    expected = (values * scale.repeat_interleave(columns // scale.shape[1], 1)).to(torch.bfloat16)
    with open_model(child, if_quantized="") as opened:
        assert opened.form == ("MXFP4 weights" if form == "mxfp4" else "NVFP4 weights")
        assert torch.equal(opened.read(NAME), expected)
        assert torch.equal(opened.read_rows(NAME, 3, 7), expected[3:7])
        assert NAME in opened
        assert all(entry.dtype == "BF16" for entry in opened.tensors.values())
    base = load_file(BASE / "model.safetensors")[NAME].float()
    assert (expected.float() - base).norm() / base.norm() < 0.2


@pytest.mark.parametrize(
    ("leaf", "value", "says"),
    [
        ("weight_scale", None, "is missing for an FP4 weight"),
        ("weight_scale", torch.ones(32, 10), "is F32 [32, 10] for an FP4 weight [32, 160]"),
        ("weight_global_scale", torch.zeros(1), "is not one number above zero"),
        ("weight_global_scale", torch.ones(3), "is not one number above zero"),
    ],
)
def test_fp4_scales_that_do_not_fit_are_named(
    tmp_path: Path, leaf: str, value: torch.Tensor | None, says: str
) -> None:
    child = save_fp4(tmp_path / "child", "nvfp4")
    name = f"{NAME.removesuffix('.weight')}.{leaf}"

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        others = {each: tensor for each, tensor in tensors.items() if each != name}
        return others if value is None else {**others, name: value}

    change_tensors(child, change)
    with pytest.raises(ModelError, match=re.escape(says)):
        open_model(child, if_quantized="")
