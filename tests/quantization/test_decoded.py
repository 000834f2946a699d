"""Quantized checkpoints that are decoded while they are read."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from fp8calib.quantization.sources.decoded import decode_model
from fp8calib.quantization.sources.int4 import Int4Source, is_int4_source
from fp8calib.quantization.sources.packed import unpack
from tests import zoo
from tests.cli.quantized_children import BASE, save_child, save_fp4, save_gpt_oss, save_int
from tests.int4_by_hand import WEIGHTS, Int4, Tensors, make_section, store, write_section
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
    with decode_model(Checkpoint.open(child), if_quantized="") as opened:
        whole = opened.read(NAME)
        assert whole.dtype is opened.dtype(NAME) is torch.bfloat16
        entry = opened.tensors[NAME]
        assert (entry.dtype, entry.shape) == ("BF16", tuple(whole.shape))
        assert torch.equal(opened.read_rows(NAME, 5, 9), whole[5:9])
        raw = whole.view(torch.uint8).reshape(-1)
        assert torch.equal(opened.read_bytes(NAME, 101, 777), raw[101:777])
        middle = (raw.numel() - 64) // 2
        assert opened.sample_bytes(NAME, 64) == raw[middle : middle + 64].numpy().tobytes()
        assert NAME in opened.tensors
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
    with decode_model(Checkpoint.open(child), if_quantized="") as opened:
        method = "modelopt" if form == "modelopt" else "compressed-tensors"
        assert opened.form == f"{'MXFP4' if form == 'mxfp4' else 'NVFP4'} weights ({method})"
        assert torch.equal(opened.read(NAME), expected)
        assert torch.equal(opened.read_rows(NAME, 3, 7), expected[3:7])
        assert NAME in opened.tensors
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
    with decode_model(Checkpoint.open(child), if_quantized="") as opened:
        wanted = torch.from_numpy(expected).to(torch.bfloat16)
        assert torch.equal(opened.read(NAME), wanted)
        assert torch.equal(opened.read_rows(NAME, 97, 141), wanted[97:141])
        assert scale_name not in opened.tensors
        assert opened.form == f"{'MXFP4' if is_fp4 else 'FP8'} weights (fp8)"
    change_tensors(child, {scale_name: tensors[scale_name][:, 1:].contiguous()})
    with pytest.raises(ModelError, match=rf"{leaf} is \S+ \[{grid[0]}, {grid[1] - 1}\], expected"):
        decode_model(Checkpoint.open(child), if_quantized="")


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
        decode_model(Checkpoint.open(child), if_quantized="")


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
    with decode_model(Checkpoint.open(child), if_quantized="") as opened:
        assert torch.equal(opened.read(NAME), expected)
        assert torch.equal(opened.read_rows(NAME, 9, 20), expected[9:20])


def test_experts_of_gpt_oss_are_what_transformers_decodes(tmp_path: Path) -> None:
    zoo.save("gpt_oss", tmp_path / "plain", hidden_size=64, intermediate_size=32)
    child, blocks = save_gpt_oss(tmp_path / "plain", tmp_path / "child")
    with decode_model(Checkpoint.open(child), if_quantized="") as opened:
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
    with decode_model(Checkpoint.open(child), if_quantized="") as opened:
        assert opened.form == "FP8 and INT4 and NVFP4 weights (compressed-tensors)"
        names = set(opened.tensors)
        for form, folder in forms.items():
            with decode_model(Checkpoint.open(folder), if_quantized="") as single:
                assert names == set(single.tensors)
                for name in names:
                    if find_form(name) == form:
                        assert torch.equal(opened.read(name), single.read(name)), name


UP = "model.layers.0.mlp.up_proj"
NORM = "model.norm.weight"


def random_integers(rows: int, columns: int) -> np.ndarray:
    """Draw integers from -8 to 7, all of them in a matrix of some size."""
    return np.random.default_rng(rows * columns).integers(-8, 8, (rows, columns))


def save(folder: Path, tensors: Tensors, section: Any = None) -> Path:
    """Write a checkpoint of these tensors and a norm."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write_section(folder, make_section() if section is None else section)
    save_file({NORM: torch.ones(4), **tensors}, folder / "model.safetensors")
    return folder


def make_weight(*, packed: bool = True) -> Tensors:
    """Make a weight of 5 x 13."""
    return store(f"{UP}.weight", Int4(random_integers(5, 13), np.float32(0.03125)), packed=packed)


def refuse(folder: Path, tensors: Tensors, section: Any = None) -> str:
    with (
        Checkpoint.open(save(folder, tensors, section)) as checkpoint,
        pytest.raises(ModelError) as raised,
    ):
        Int4Source(checkpoint).read(f"{UP}.weight")
    assert raised.value.hint
    return raised.value.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Its own product is rounded to the scale's dtype: its integers and scale are compared."""
    torch.manual_seed(0)
    weight = torch.randn(24, 20, dtype=dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS))
    scale = (weight.std() / 3).reshape(1)
    state = {"weight": weight, "weight_scale": scale}
    stored = PackedQuantizationCompressor.compress(state, scheme)
    tensors = {f"{UP}.{name}": value.contiguous() for name, value in stored.items()}
    with Checkpoint.open(save(tmp_path / "m", tensors)) as checkpoint:
        assert is_int4_source(checkpoint)
        source = Int4Source(checkpoint)
        found = source.read(f"{UP}.weight")
        assert torch.equal(found[3:7], source.read_rows(f"{UP}.weight", 3, 7))
    integers = unpack_from_int32(stored["weight_packed"], 4, weight.shape)
    assert (int(integers.min()), int(integers.max())) == (-8, 7)
    assert torch.equal(found, integers.float() * scale.float())
    decompressed = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(found.to(dtype), decompressed.to(dtype))


@pytest.mark.parametrize("packed", [True, False])
def test_scales_are_left_out_and_other_tensors_stay(tmp_path: Path, *, packed: bool) -> None:
    """Scales of inputs, K and V stand beside weights, and are nobody's here."""
    others = {f"{UP}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    section = make_section(form="pack-quantized" if packed else "int-quantized")
    folder = save(tmp_path / "m", {**make_weight(packed=packed), **others}, section)
    with Checkpoint.open(folder) as checkpoint:
        source = Int4Source(checkpoint)
        assert source.tensors.keys() == {NORM, f"{UP}.weight"}
        assert source.tensors[f"{UP}.weight"].shape == (5, 13)
        real = random_integers(5, 13) * np.float32(0.03125)
        assert np.array_equal(source.read(f"{UP}.weight").numpy(), real)
        assert torch.equal(source.read(NORM), torch.ones(4))
        assert torch.equal(source.read_rows(NORM, 1, 3), torch.ones(2))
        assert torch.equal(source.scale(f"{UP}.weight"), torch.tensor(0.03125))
        assert torch.equal(source.scale(NORM), torch.tensor(0.0))


SHAPE, SCALE, WORDS, ZERO = (
    f"{UP}.weight_{end}" for end in ("shape", "scale", "packed", "zero_point")
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({SHAPE: torch.tensor([5, 17])}, "is I32 [5, 2], expected integers"),
        ({SHAPE: torch.tensor([5, -3])}, "expected the two sizes of a weight"),
        ({SHAPE: torch.tensor([5, 1, 13])}, "expected the two sizes of a weight"),
        ({SHAPE: torch.tensor([5.0, 13.0])}, "expected the two sizes of a weight"),
        ({WORDS: torch.zeros(5, 2)}, "describes int4 weights, but there are none"),
        ({SCALE: torch.ones(5, 1)}, "weight_scale is [5, 1], where"),
        ({SCALE: torch.ones(1, dtype=torch.int32)}, "weight_scale is I32 [1], expected"),
        ({SCALE: torch.tensor([-1.0])}, "weight_scale is -1, where"),
        ({SCALE: torch.tensor([float("nan")])}, "weight_scale is nan, where"),
        ({SCALE: torch.tensor([float("inf")])}, "weight_scale is inf, where"),
        ({ZERO: torch.zeros(1)}, f"{ZERO} is F32 [1], expected zero points"),
        ({ZERO: torch.zeros(1, dtype=torch.int8)}, "INT4 with zero points"),
        ({f"{UP}.weight_g_idx": torch.zeros(1)}, f"{UP}.weight_g_idx: groups of reordered columns"),
        ({"x.weight": torch.ones(2, 2, dtype=torch.int8)}, "x.weight_scale is missing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: Tensors, named: str) -> None:
    assert named in refuse(tmp_path / "m", {**make_weight(), **changes})


def test_more_bits_and_rotated_weights_are_refused(tmp_path: Path) -> None:
    tensors = make_weight(packed=False)
    tensors[f"{UP}.weight"][2, 3] = 8
    text = refuse(tmp_path / "m", tensors, make_section(form="int-quantized"))
    assert f"{UP}.weight holds integers of more than four bits" in text
    rotated = make_section(transform_config={"config_groups": {"u": {}}})
    assert "transform_config rotates" in refuse(tmp_path / "r", make_weight(), rotated)


@pytest.mark.parametrize(
    ("weights", "more", "expected"),
    [
        ({"num_bits": 4}, {}, True),  # a strategy that is not told is per tensor, and symmetric
        ({"num_bits": 4, "group_size": 128}, {}, False),
        ({}, {}, False),
        ({**WEIGHTS, "dynamic": True}, {}, False),
        (WEIGHTS, {"other": {"weights": {**WEIGHTS, "num_bits": 8}}}, False),
    ],
)
def test_a_form_is_told_from_its_config(
    tmp_path: Path, weights: dict[str, Any], more: dict[str, Any], expected: bool
) -> None:
    section = make_section(weights)
    section["config_groups"] |= more
    with Checkpoint.open(save(tmp_path / "m", make_weight(), section)) as checkpoint:
        assert is_int4_source(checkpoint) is expected
