"""Quantized checkpoints that are decoded while they are read."""

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fp8calib.commands.model import open_model
from fp8calib.errors import ModelError
from fp8calib.quantization.sources.packed import unpack
from tests import zoo
from tests.cli.quantized_children import (
    BASE,
    save_child,
    save_fp4,
    save_gpt_oss,
    save_int,
)
from tests.kit.checkpoints import change_config, change_quantization, change_tensors

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
        raw = whole.view(torch.uint8).reshape(-1)
        assert torch.equal(opened.read_bytes(NAME, 101, 777), raw[101:777])
        middle = (raw.numel() - 64) // 2
        assert opened.sample_bytes(NAME, 64) == raw[middle : middle + 64].numpy().tobytes()
        assert NAME in opened
        assert not any(name.endswith(("_scale", "_packed", "_shape")) for name in opened.tensors)
        assert any(name.endswith("_scale") or "scale_inv" in name for name in opened.stored.tensors)
        assert "quantization_config" not in opened.load_config()
        assert "quantization_config" in opened.stored.load_config()


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
        method = "modelopt" if form == "modelopt" else "compressed-tensors"
        assert opened.form == f"{'MXFP4' if form == 'mxfp4' else 'NVFP4'} weights ({method})"
        assert torch.equal(opened.read(NAME), expected)
        assert torch.equal(opened.read_rows(NAME, 3, 7), expected[3:7])
        assert NAME in opened
        assert all(entry.dtype == "BF16" for entry in opened.tensors.values())
    base = load_file(BASE / "model.safetensors")[NAME].float()
    assert (expected.float() - base).norm() / base.norm() < 0.2


FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("size", "leaf", "block", "scales", "is_fp4"),
    [
        ([128, 128], "scale", (128, 128), torch.float8_e8m0fnu, False),
        (None, "scale", (128, 128), torch.float8_e8m0fnu, False),
        ([128, 128], "scale", (1, 32), torch.float8_e8m0fnu, True),
        ([32, 64], "weight_scale_inv", (32, 64), torch.float32, False),
        ([1, 32], "weight_scale_inv", (1, 32), torch.float8_e8m0fnu, False),
    ],
)
def test_blocks_of_any_size_and_deepseek_v4_are_codes_times_scales(
    tmp_path: Path,
    size: object,
    leaf: str,
    block: tuple[int, int],
    scales: torch.dtype,
    is_fp4: bool,
) -> None:
    rows, columns = 150, 160
    rng = np.random.default_rng(1)
    octets = rng.integers(0, 127, (rows, columns // (2 if is_fp4 else 1)), dtype=np.uint8)
    octets |= rng.integers(0, 2, octets.shape, dtype=np.uint8) << 7
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    powers = 2.0 ** rng.integers(-12, 3, grid)
    expected = np.zeros((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        if is_fp4:
            code = int(octets[row, column // 2]) >> 4 * (column % 2) & 15
            value = FP4[code & 7] * (-1 if code & 8 else 1)
        else:
            value = float(octets[row, column : column + 1].view(ml_dtypes.float8_e4m3fn)[0])
        expected[row, column] = value * float(powers[row // block[0], column // block[1]])
    scale_name = f"{NAME.removesuffix('.weight')}.{leaf}"
    tensors = {
        NAME: torch.from_numpy(octets).view(torch.int8 if is_fp4 else torch.float8_e4m3fn),
        scale_name: torch.from_numpy(powers).float().to(scales),
    }
    child = Path(shutil.copytree(BASE, tmp_path / "child"))
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    change_config(
        child, quantization_config=section | ({"weight_block_size": size} if size else {})
    )
    change_tensors(child, tensors)
    with open_model(child, if_quantized="") as opened:
        wanted = torch.from_numpy(expected).to(torch.bfloat16)
        assert torch.equal(opened.read(NAME), wanted)
        assert torch.equal(opened.read_rows(NAME, 97, 141), wanted[97:141])
        assert scale_name not in opened
        assert opened.form == f"{'MXFP4' if is_fp4 else 'FP8'} weights (fp8)"
    change_tensors(child, {scale_name: tensors[scale_name][:, 1:].contiguous()})
    with pytest.raises(ModelError, match=rf"{leaf} is \S+ \[{grid[0]}, {grid[1] - 1}\], expected"):
        open_model(child, if_quantized="")


@pytest.mark.parametrize(
    ("leaf", "value", "says"),
    [
        ("weight_scale", None, "is missing, expected scales of 16"),
        ("weight_scale", torch.ones(32, 10), "is F32 [32, 10], expected scales of 16"),
        ("weight_global_scale", torch.zeros(1), "is not one number above zero"),
        ("weight_global_scale", torch.ones(3), "is not one number above zero"),
    ],
)
def test_fp4_scales_that_do_not_fit_are_named(
    tmp_path: Path, leaf: str, value: torch.Tensor | None, says: str
) -> None:
    child = save_fp4(tmp_path / "child", "nvfp4")
    change_tensors(child, {f"{NAME.removesuffix('.weight')}.{leaf}": value})
    with pytest.raises(ModelError, match=re.escape(says)):
        open_model(child, if_quantized="")


@pytest.mark.parametrize(
    ("bits", "group", "is_packed"),
    [(4, 32, True), (4, None, True), (8, 32, True), (8, None, False), (8, 16, False)],
)
def test_zero_points_are_those_of_compressed_tensors(
    tmp_path: Path, bits: int, group: int | None, is_packed: bool
) -> None:
    """Three rows more than a word holds."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    arguments = quantization.QuantizationArgs(
        num_bits=bits,
        strategy="group" if group else "channel",
        group_size=group,
        symmetric=False,
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = compressors.BaseCompressor.get_value_from_registry(
        "pack-quantized" if is_packed else "int-quantized"
    )
    groups, half = 160 // (group or 160), 2 ** (bits - 1)
    stored = {
        "weight": torch.randn(35, 160),
        "weight_scale": (torch.rand(35, groups) / half).to(torch.bfloat16).float(),
        "weight_zero_point": torch.randint(-half, half, (35, groups), dtype=torch.int8),
    }
    compressed = compressor.compress(stored, scheme)
    module = NAME.removesuffix(".weight")
    child = save_int(tmp_path / "child", 4)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        others = {name: t for name, t in tensors.items() if not name.startswith(module)}
        return others | {f"{module}.{leaf}": tensor for leaf, tensor in compressed.items()}

    change_tensors(child, change)
    expected = compressor.decompress(compressed, scheme)["weight"].to(torch.bfloat16)
    with open_model(child, if_quantized="") as opened:
        assert torch.equal(opened.read(NAME), expected)
        assert torch.equal(opened.read_rows(NAME, 9, 20), expected[9:20])


def test_experts_of_gpt_oss_are_what_transformers_decodes(tmp_path: Path) -> None:
    zoo.save("gpt_oss", tmp_path / "plain", hidden_size=64, intermediate_size=32)
    child, blocks = save_gpt_oss(tmp_path / "plain", tmp_path / "child")
    with open_model(child, if_quantized="") as opened:
        assert opened.form == "MXFP4 weights (mxfp4)"
        for name, (octets, scales) in blocks.items():
            expected = convert_moe_packed_tensors(octets, scales, dtype=torch.bfloat16)
            assert torch.equal(opened.read(name), expected)
            part = opened.read_block(name, 1, range(3, 9), range(5, 11))
            assert torch.equal(part, expected[1, 3:9, 5:11])


def test_zero_points_of_few_rows_are_a_column_of_words() -> None:
    words = torch.tensor([[0x76543210, -0x12345679]], dtype=torch.int32)

    found = unpack(words.T, 8, 4)

    assert found.tolist() == [[*range(-8, 0)], [*range(-1, 7)]]


def find_form(name: str) -> str:
    return "FP8" if ".self_attn." in name else "INT4" if ".gate_proj." in name else "NVFP4"


TARGETS = {"FP8": ["re:.*self_attn.*"], "INT4": ["re:.*gate_proj"], "NVFP4": ["Linear"]}


def test_forms_of_several_groups_are_decoded_together(tmp_path: Path) -> None:
    """Attention in FP8, gate_proj in INT4, and everything else in NVFP4."""
    forms = {
        "NVFP4": save_fp4(tmp_path / "nvfp4", "nvfp4"),
        "FP8": save_child(CHANNELS, tmp_path / "fp8"),
        "INT4": save_int(tmp_path / "int4", 4, group=32),
    }
    child = Path(shutil.copytree(forms["NVFP4"], tmp_path / "child"))
    tensors, groups = {}, {}
    for form, folder in forms.items():
        stored = load_file(folder / "model.safetensors")
        tensors |= {name: each for name, each in stored.items() if find_form(name) == form}
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        own = {"targets": TARGETS[form], "format": section["format"]}
        groups[form] = section["config_groups"]["group_0"] | own
    change_tensors(child, lambda _: tensors)
    change_quantization(child, format="mixed-precision", config_groups=groups)
    with open_model(child, if_quantized="") as opened:
        assert opened.form == "FP8 and INT4 and NVFP4 weights (compressed-tensors)"
        names = set(opened.tensors)
        for form, folder in forms.items():
            with open_model(folder, if_quantized="") as single:
                assert names == set(single.tensors)
                for name in names:
                    if find_form(name) == form:
                        assert torch.equal(opened.read(name), single.read(name)), name
