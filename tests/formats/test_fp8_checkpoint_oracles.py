"""FP8 checkpoints that compressed-tensors wrote, read as compressed-tensors and transformers do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM

from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.numerics.schemes import InputScaling
from tests.formats.fp8_handmade import FINEGRAINED, save
from tests.zoo import build

BLOCK = 128
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
STATIC = FP8 | {"strategy": "tensor"}
TOKEN = FP8 | {"strategy": "token", "dynamic": True}
GROUP = FP8 | {"strategy": "group", "group_size": BLOCK, "dynamic": True}
BLOCKS = FP8 | {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, InputScaling]] = {
    "static": (STATIC, STATIC, InputScaling.STATIC),
    "channel": (FP8 | {"strategy": "channel"}, TOKEN, InputScaling.TOKEN),
    "block": (BLOCKS, GROUP, InputScaling.GROUP),
    "weights only": (FP8 | {"strategy": "channel"}, None, InputScaling.NONE),
}


def _blocks(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    for rows in weight.split(BLOCK, dim=0):
        yield from rows.split(BLOCK, dim=1)


def _find_extremes(weight: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    shape = (-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    blocks = list(_blocks(weight))
    lowest = torch.stack([block.min() for block in blocks]).reshape(shape)
    return lowest, torch.stack([block.max() for block in blocks]).reshape(shape)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 256), (7, 300), (256, 127)])
def test_the_compressor_of_compressed_tensors_decompresses_to_the_same_values(
    tmp_path: Path, scheme: str, shape: tuple[int, int]
) -> None:
    weights, inputs, _ = SCHEMES[scheme]
    arguments = QuantizationArgs(**weights)
    group = QuantizationScheme(targets=["Linear"], weights=arguments, format="float-quantized")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    low, high = _find_extremes(weight, str(arguments.strategy))
    scale, _ = calculate_qparams(low, high, arguments)
    compressed = NaiveQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale}, group
    )
    theirs = NaiveQuantizationCompressor.decompress(dict(compressed), group)["weight"]
    tensors = {f"a.{name}": tensor for name, tensor in compressed.items()}
    if inputs is STATIC:
        tensors["a.input_scale"] = torch.ones(1)
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
    checkpoint = Fp8Checkpoint.open(save(tmp_path, tensors, config), fuse=False)
    assert torch.equal(checkpoint.read("a.weight"), theirs)


def test_transformers_dequantizes_fine_grained_weights_to_the_same_values(tmp_path: Path) -> None:
    # In blocks that divide the weight: transformers 5.23 dequantizes no others at load.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = build("llama", num_key_value_heads=4, **sizes)
    model.config.quantization_config = FINEGRAINED | {"dequantize": True}
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if "_proj" in name]:
        scale = _find_extremes(tensors[name].abs(), "block")[1] / 448
        grid = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        tensors[name] = (tensors[name] / grid).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save(tmp_path, tensors, None)
    model.config.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    with Fp8Checkpoint.open(tmp_path, fuse=False) as checkpoint:
        assert checkpoint.dialect.name == "autofp8"
        assert len(checkpoint.quantized) == 14
        for name in checkpoint.tensors:
            assert torch.equal(theirs[name], checkpoint.read(name)), name
