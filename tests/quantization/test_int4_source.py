"""Int4 weights read back: against a packer made of loops, and against compressed-tensors itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from fp8calib.quantization.sources.int4 import Int4Source, ScaleSpread, is_int4_source
from tests.int4_by_hand import WEIGHTS, Int4, Tensors, make_section, store, write_section

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
        spread = ScaleSpread(source)
        assert torch.equal(spread.read(f"{UP}.weight"), torch.full((5, 13), 0.03125))
        assert torch.equal(spread.read(NORM), torch.zeros(4))


SHAPE, SCALE, WORDS, ZERO = (
    f"{UP}.weight_{end}" for end in ("shape", "scale", "packed", "zero_point")
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({SHAPE: torch.tensor([5, 17])}, "is I32 [5, 2], expected integers"),
        ({SHAPE: torch.tensor([5, -3])}, "weight_shape is not the two sizes"),
        ({SHAPE: torch.tensor([5, 1, 13])}, "weight_shape is not the two sizes"),
        ({SHAPE: torch.tensor([5.0, 13.0])}, "weight_shape is not the two sizes"),
        ({WORDS: torch.zeros(5, 2)}, "describes int4 weights, but there are none"),
        ({SCALE: torch.ones(5, 1)}, "weight_scale is [5, 1], where one scale is expected"),
        ({SCALE: torch.ones(1, dtype=torch.int32)}, "weight_scale is I32 [1], expected"),
        ({SCALE: torch.tensor([-1.0])}, "weight_scale: -1 is not a scale"),
        ({SCALE: torch.tensor([float("nan")])}, "weight_scale: nan is not a scale"),
        ({SCALE: torch.tensor([float("inf")])}, "weight_scale: inf is not a scale"),
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
