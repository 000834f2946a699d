"""A fault in an FP8 checkpoint is one error that names the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import require_format
from tests.formats.fp8_handmade import (
    AUTOFP8_DYNAMIC,
    AUTOFP8_STATIC,
    CODES,
    CT_BLOCK,
    CT_CHANNEL,
    CT_STATIC,
    FBGEMM,
    FINEGRAINED,
    LINEAR,
    PER_GROUP,
    Tensors,
    codes,
    compressed_tensors,
    group,
    linear,
    modelopt,
    quantizer,
    quark,
    save,
    scalar,
)

WEIGHT = f"{LINEAR}.weight"
SCALE = f"{LINEAR}.weight_scale"
INPUT_SCALE = f"{LINEAR}.input_scale"
STACKED = "model.layers.0.mlp.experts.gate_up_proj"
HALF = scalar(0.5)


def _read_all(folder: Path, *, fuse: bool = True) -> None:
    with Fp8Checkpoint.open(folder, fuse=fuse) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)
            if name in checkpoint.quantized:
                checkpoint.weight_scale(name)
                checkpoint.activation(name)


def _refuse(folder: Path, tensors: Tensors, config: object) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _read_all(save(folder, tensors, config))
    assert caught.value.message.startswith(str(folder))
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("config", [CT_STATIC, CT_CHANNEL, CT_BLOCK])
def test_a_config_of_compressed_tensors_without_a_format_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    groups = {
        name: {key: value for key, value in item.items() if key != "format"}
        for name, item in config["config_groups"].items()
    }
    bare = {key: value for key, value in config.items() if key != "format"}
    require_format(tmp_path, {"quantization_config": config})
    require_format(tmp_path, {"quantization_config": bare})
    require_format(tmp_path, {"quantization_config": config | {"config_groups": groups}})
    with pytest.raises(ModelError, match="'group_0' of config_groups has no format"):
        require_format(tmp_path, {"quantization_config": bare | {"config_groups": groups}})


def test_a_scale_lost_in_fp16_says_so(tmp_path: Path) -> None:
    tensors = linear(scale=scalar(1e-8).to(torch.float16))
    assert "fp16" in _refuse(tmp_path, tensors, AUTOFP8_DYNAMIC).hint


def test_a_scale_that_the_index_leaves_out_is_found_for_the_user(tmp_path: Path) -> None:
    save(tmp_path, linear(), AUTOFP8_DYNAMIC)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    second = {SCALE: HALF, "model.norm.weight": torch.ones(2)}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    shards = {
        WEIGHT: "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="weight_scale") as caught:
        Fp8Checkpoint.open(tmp_path, fuse=False)
    assert "model-00002-of-00002.safetensors, but not in the index" in caught.value.hint


ROWS = torch.ones(2, 1)
BIG = torch.zeros(130, 300, dtype=torch.float8_e4m3fn)
PLAIN, BOTH = linear(scale=HALF), linear(scale=HALF, input_scale=HALF)
STACK = {STACKED: codes(CODES).reshape(2, 2, 2)}
UP = "a.up_proj"


def ct(inputs: dict[str, object] | None = None, **weights: object) -> dict[str, object]:
    return compressed_tensors(group(quantizer(**weights), inputs))


FAULTS: dict[str, tuple[Tensors, object, str]] = {
    # a scale is missing
    "weight scale": (linear(), AUTOFP8_DYNAMIC, SCALE),
    "input scale": (PLAIN, AUTOFP8_STATIC, INPUT_SCALE),
    "scale of stacked experts": (STACK, AUTOFP8_DYNAMIC, STACKED),
    # a scale has a wrong shape
    "three in a tensor": (linear(scale=torch.ones(3)), AUTOFP8_DYNAMIC, "shape [3]"),
    "row scales as columns": (linear(scale=torch.ones(1, 4)), CT_CHANNEL, "shape [1, 4]"),
    "blocks of another size": (linear(weight=BIG, scale=torch.ones(3, 5)), CT_BLOCK, "[3, 5]"),
    "an input scale a row": (PLAIN | {INPUT_SCALE: torch.ones(2)}, AUTOFP8_STATIC, "shape [2]"),
    "experts' halves": (STACK | {f"{STACKED}_scale": torch.ones(2, 2)}, AUTOFP8_DYNAMIC, "[2, 2]"),
    "a vector": (linear(weight=codes([[0x38]]).reshape(1), scale=HALF), CT_STATIC, "shape [1]"),
    "an empty weight": (linear(weight=BIG[:0], scale=HALF), AUTOFP8_DYNAMIC, "shape [0, 300]"),
    # the config contradicts the tensors
    "channel scales, config says tensor": (
        linear(scale=ROWS, input_scale=HALF),
        CT_STATIC,
        "per channel; the config says per tensor",
    ),
    "one scale, config says channel": (PLAIN, CT_CHANNEL, "per tensor"),
    "blocks without their size": (
        linear(weight=BIG) | {f"{SCALE}_inv": torch.ones(2, 3)},
        AUTOFP8_DYNAMIC,
        "per block; the config says per tensor",
    ),
    "one inverse, config says block": (
        linear() | {f"{SCALE}_inv": HALF},
        FINEGRAINED,
        "per tensor; the config says per block",
    ),
    "dynamic inputs with a scale": (BOTH, AUTOFP8_DYNAMIC, "input_scale"),
    "weights alone with an input scale": (
        linear(scale=ROWS, input_scale=HALF),
        ct(strategy="channel"),
        "input_scale",
    ),
    **{
        f"left out, {index}": (tensors, config, "the config excludes")
        for index, (tensors, config) in enumerate(
            (
                (PLAIN, AUTOFP8_DYNAMIC | {"ignored_layers": [LINEAR]}),
                (PLAIN, AUTOFP8_DYNAMIC | {"modules_to_not_convert": ["model.layers.0"]}),
                (BOTH, CT_STATIC | {"ignore": ["re:.*o_proj"]}),
                (BOTH, quark(exclude=["*.o_proj"])),
            )
        )
    },
    "of no group": (
        BOTH,
        compressed_tensors(group(quantizer(), quantizer(), "re:.*mlp.*")),
        "no config group",
    ),
    "int8": (BOTH, ct(quantizer(), type="int"), "int"),
    "no weights": (PLAIN, compressed_tensors(group({}, None)), "int"),
    "nvfp4": (PLAIN, modelopt("NVFP4"), "NVFP4"),
    "mixed, but not this one": (
        PLAIN,
        modelopt("MIXED_PRECISION") | {"quantized_layers": {}},
        "None",
    ),
    "quark in int8": (PLAIN, quark({"dtype": "int8"}), "int8"),
    "the inverse in compressed-tensors": (
        linear(input_scale=HALF) | {f"{SCALE}_inv": HALF},
        CT_STATIC,
        "weight_scale_inv, but quant_method is compressed-tensors",
    ),
}
UNREAD: dict[str, tuple[Tensors, object, str]] = {
    "no config": (PLAIN, None, "quantization_config"),
    "an unknown method": (PLAIN, {"quant_method": "awq"}, "awq"),
    "no activation scheme": (PLAIN, {"quant_method": "fp8"}, "activation_scheme"),
    "static inputs in blocks": (
        PLAIN,
        FINEGRAINED | {"activation_scheme": "static"},
        "weight_block_size",
    ),
    "a block of one size": (PLAIN, FINEGRAINED | {"weight_block_size": [128]}, "[128]"),
    "groups of 64": (PLAIN, ct(PER_GROUP | {"group_size": 64}), "64"),
    "weights in groups": (PLAIN, ct(strategy="group", group_size=128), "group"),
    "blocks without a size": (
        linear(scale=torch.ones(1, 1)),
        ct(PER_GROUP, strategy="block"),
        "block size is missing",
    ),
    "dynamic weights": (PLAIN, ct(dynamic=True), "dynamic"),
    "asymmetric": (PLAIN, ct(symmetric=False), "zero point"),
    "rotated": (
        BOTH,
        CT_STATIC | {"transform_config": {"config_groups": {"R1": {}}}},
        "transform_config",
    ),
    "an endless upper bound": (
        linear(scale=ROWS),
        FBGEMM | {"activation_scale_ub": 10**400},
        "activation_scale_ub",
    ),
    "not an expression": (BOTH, CT_STATIC | {"ignore": ["re:(", "re:*"]}, "regular expression"),
    "an expression that never ends": (
        BOTH,
        CT_STATIC | {"ignore": ["re:(.*)*(.*)*x$"]},
        "exponential time",
    ),
    "a zero point that is not zero": (
        BOTH | {f"{LINEAR}.weight_zero_point": torch.ones(1)},
        CT_STATIC,
        "weight_zero_point",
    ),
    "two scales": (PLAIN | {f"{SCALE}_inv": HALF}, AUTOFP8_DYNAMIC, f"weight_scale, {SCALE}_inv"),
    "integer scales": (linear(scale=torch.ones(1, dtype=torch.uint8)), AUTOFP8_DYNAMIC, "U8"),
    "fp8 scales": (linear(scale=codes([[0x38]]).reshape(1)), AUTOFP8_DYNAMIC, "F8_E4M3"),
    "a scale of nothing": (
        PLAIN | {"model.layers.0.mlp.up_proj.weight_scale": HALF},
        AUTOFP8_DYNAMIC,
        "up_proj.weight_scale",
    ),
    "a scale of an int8 weight": (
        PLAIN | linear(UP, weight=torch.ones(2, 4, dtype=torch.int8), scale=HALF),
        AUTOFP8_DYNAMIC,
        f"{UP}.weight_scale",
    ),
    "two formats": (
        PLAIN | linear(UP, weight=codes(CODES, torch.float8_e4m3fnuz), scale=HALF),
        AUTOFP8_DYNAMIC,
        "F8_E4M3FNUZ",
    ),
    "a format of no engine": (
        linear(weight=codes(CODES, torch.float8_e5m2fnuz), scale=HALF),
        AUTOFP8_DYNAMIC,
        "F8_E5M2FNUZ",
    ),
    "no fp8": ({WEIGHT: torch.ones(2, 4)}, CT_STATIC, "no FP8 weights"),
}


@pytest.mark.parametrize("case", [*FAULTS, *UNREAD])
def test_a_fault_is_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, config, words = (FAULTS | UNREAD)[case]
    error = _refuse(tmp_path, dict(tensors), config)
    assert words in error.message
    assert error.hint or case in UNREAD


def test_a_tensor_that_is_not_there_or_not_fp8_is_named(tmp_path: Path) -> None:
    tensors = linear(scale=HALF) | {"model.norm.weight": torch.ones(2)}
    checkpoint = Fp8Checkpoint.open(save(tmp_path, tensors, AUTOFP8_DYNAMIC), fuse=False)
    readers: tuple[Callable[[str], object], ...] = (
        checkpoint.read,
        checkpoint.dtype,
        checkpoint.weight_scale,
        checkpoint.activation,
        lambda name: checkpoint.read_rows(name, 0, 1),
    )
    for read in readers:
        for name in ("model.nowhere.weight", SCALE):
            with pytest.raises(ModelError, match=name):
                read(name)
    for read in (checkpoint.weight_scale, checkpoint.activation):
        with pytest.raises(ModelError, match=r"model\.norm\.weight"):
            read("model.norm.weight")
