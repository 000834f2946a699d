"""FP8 checkpoints of every tool, made by hand, read as numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import require_format
from fp8calib.formats.fp8.match_scales import is_fp8_checkpoint
from fp8calib.numerics.formats import E4M3FNUZ
from tests.formats.fp8_handmade import (
    AUTOFP8_DYNAMIC,
    AUTOFP8_STATIC,
    CASES,
    CODES,
    CT_BLOCK,
    CT_CHANNEL,
    CT_STATIC,
    FINEGRAINED,
    LINEAR,
    MODELOPT,
    PER_TOKEN,
    VALUES,
    Tensors,
    codes,
    compressed_tensors,
    find_config,
    group,
    linear,
    make_tensors,
    modelopt,
    quantizer,
    quark,
    save,
    scalar,
)

WEIGHT = f"{LINEAR}.weight"
EXPERTS = "model.layers.3.mlp.experts"

STATIC = {"kind": "static", "scale": 0.125}
TOKEN, GROUP, NONE = {"kind": "token"}, {"kind": "group"}, {"kind": "none"}

HALF = scalar(0.5)
INPUT = scalar(0.125)
HALVED = [[value * 0.5 for value in row] for row in VALUES]
ROWS = torch.tensor([0.5, 4.0])
BY_ROW = [[value * 0.5 for value in VALUES[0]], [value * 4 for value in VALUES[1]]]

PER_CHANNEL = quantizer(strategy="channel")
QUARK_TOKEN = {"dtype": "fp8_e4m3", "is_dynamic": True, "qscheme": "per_channel"}

ALONE = linear(scale=HALF)


def _open(folder: Path, tensors: Tensors, config: object, *, fuse: bool = False) -> Fp8Checkpoint:
    return Fp8Checkpoint.open(save(folder, tensors, config), fuse=fuse)


def find_inputs(checkpoint: Fp8Checkpoint, name: str) -> dict[str, object]:
    """Say how the inputs of a linear are quantized, by the name of its weight."""
    scheme = checkpoint.scheme(name)
    found = {"scale": scheme.input_scale, "upper_bound": scheme.upper_bound}
    known = {key: value for key, value in found.items() if value is not None}
    return {"kind": scheme.inputs, **known, **({"is_mx": True} if scheme.is_mx else {})}


@pytest.mark.parametrize("form", CASES["forms"])
@pytest.mark.parametrize("fuse", [False, True])
def test_every_form_gives_codes_times_scales(tmp_path: Path, form: str, fuse: bool) -> None:
    """Beside those of `tests/foreign`, which `test_foreign.py` reads."""
    row = CASES["forms"][form]
    tensors = make_tensors(row["tensors"])
    checkpoint = _open(tmp_path, tensors, find_config(row["config"]), fuse=fuse)
    assert checkpoint.read(WEIGHT).tolist() == (HALVED if row["values"] == "halved" else BY_ROW)
    assert checkpoint.read(WEIGHT).dtype == checkpoint.dtype(WEIGHT) == torch.float32
    assert find_inputs(checkpoint, WEIGHT) == row["inputs"]
    assert checkpoint.dialect.name == row["method"]
    assert checkpoint.quantized == {WEIGHT}
    assert list(checkpoint.tensors) == [WEIGHT]


def _make_blocks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a weight [130, 300], its scales [2, 3], and element by element the product."""
    weight = torch.arange(130 * 300).remainder(0x7F).to(torch.uint8).reshape(130, 300)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    values = weight.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64).tolist()
    scales = scale.tolist()
    expected = [
        [value * scales[row // 128][column // 128] for column, value in enumerate(values[row])]
        for row in range(130)
    ]
    return weight.view(torch.float8_e4m3fn), scale, torch.tensor(expected)


def test_fused_weights_in_fnuz_are_rounded_to_fnuz(tmp_path: Path) -> None:
    # 240 * 0.75 = 180, between 176 and 192; 7.5 * 0.75 = 5.625, between 5.5 and 6.
    weight = codes([[0x7F, 0x57]], torch.float8_e4m3fnuz)
    tensors = linear("a.q_proj", weight=weight, scale=scalar(0.75))
    tensors |= linear("a.k_proj", weight=weight, scale=scalar(1.0))
    checkpoint = _open(tmp_path, tensors, AUTOFP8_DYNAMIC, fuse=True)
    assert checkpoint.fmt is E4M3FNUZ
    assert checkpoint.read("a.q_proj.weight").tolist() == [[176.0, 5.5]]
    assert checkpoint.read("a.k_proj.weight").tolist() == [[240.0, 7.5]]


def test_stacked_experts_in_blocks_have_blocks_of_their_own(tmp_path: Path) -> None:
    weight, scale, expected = _make_blocks()
    name = f"{EXPERTS}.down_proj"
    tensors = {
        name: torch.stack([weight, weight]),
        f"{name}_scale_inv": torch.stack([scale, scale * 2]),
    }
    checkpoint = _open(tmp_path, tensors, FINEGRAINED)
    assert torch.equal(checkpoint.read(name), torch.stack([expected, expected * 2]))
    assert torch.equal(checkpoint.read_rows(name, 1, 2), expected[None] * 2)


GROUPS = compressed_tensors(
    group(quantizer(), quantizer(), "re:.*gate_proj$", "re:.*up_proj$"),
    group(PER_CHANNEL, PER_TOKEN, "model.layers.0.mlp.gate_proj", "Linear"),
    group(quantizer(), None, "Embedding"),
    group(quantizer(num_bits=4, type="int"), None, "re:.*experts.*"),
)


def test_each_group_of_compressed_tensors_has_its_own_scheme(tmp_path: Path) -> None:
    mlp = "model.layers.0.mlp"
    rows = ROWS.reshape(2, 1)
    tensors = (
        linear(f"{mlp}.up_proj", scale=HALF, input_scale=INPUT)
        | linear(f"{mlp}.gate_proj", scale=rows)
        | linear(f"{mlp}.down_proj", scale=rows)
        | linear("model.embed_tokens", scale=HALF)
    )
    checkpoint = _open(tmp_path, tensors, GROUPS)
    kinds = {name: find_inputs(checkpoint, name) for name in checkpoint.quantized}
    assert kinds == {
        f"{mlp}.up_proj.weight": STATIC,
        f"{mlp}.gate_proj.weight": TOKEN,
        f"{mlp}.down_proj.weight": TOKEN,
        "model.embed_tokens.weight": NONE,
    }


def test_quark_takes_the_rule_by_name_before_that_by_class_before_that_for_all(
    tmp_path: Path,
) -> None:
    whole = quark()["global_quant_config"]
    bare = quark(None)["global_quant_config"]
    token = quark(QUARK_TOKEN)["global_quant_config"]
    config = quark(
        layer_quant_config={"*down_proj": bare},
        layer_type_quant_config={"<class 'torch.nn.modules.linear.Linear'>": token},
    )
    assert whole != token
    tensors = linear("a.down_proj", scale=HALF) | linear("a.up_proj", scale=HALF)
    checkpoint = _open(tmp_path, tensors, config)
    assert find_inputs(checkpoint, "a.down_proj.weight") == NONE
    assert find_inputs(checkpoint, "a.up_proj.weight") == TOKEN


TINY = scalar(2.0**-20)
"""Codes up to 2^-6 times this scale are zero in fp16, whose smallest number is 2^-24."""
EXACT = [[value * 2.0**-20 for value in row] for row in VALUES]
AFTER_FP16 = [[0.0 if abs(value) <= 2.0**-26 else value for value in row] for row in EXACT]


@pytest.mark.parametrize(
    ("config", "modules", "scales", "keeps", "is_exact"),
    [
        (AUTOFP8_STATIC, ("a.q_proj", "a.k_proj"), (TINY, TINY), True, False),
        (MODELOPT, ("a.q_proj", "a.k_proj"), (TINY, TINY), True, True),
        (MODELOPT, ("a.q_proj", "a.k_proj"), (TINY, TINY), False, False),
        (MODELOPT, ("a.q_proj", "a.k_proj"), (TINY, TINY / 2), True, False),
        (MODELOPT, ("a.o_proj", "b.o_proj"), (TINY, TINY), True, True),
        (
            AUTOFP8_STATIC,
            ("m.experts.0.down_proj", "m.experts.1.down_proj"),
            (TINY, TINY),
            True,
            True,
        ),
        (MODELOPT, ("m.experts.0.gate_proj", "m.experts.0.up_proj"), (TINY, TINY), True, False),
    ],
)
def test_which_weights_go_through_fp16_at_load(
    tmp_path: Path,
    config: dict[str, object],
    modules: tuple[str, str],
    scales: tuple[torch.Tensor, torch.Tensor],
    keeps: bool,
    is_exact: bool,
) -> None:
    tensors: Tensors = {}
    for module, scale in zip(modules, scales, strict=True):
        tensors |= linear(module, scale=scale, input_scale=INPUT)
    save(tmp_path, tensors, config)
    name = f"{modules[0]}.weight"

    with Fp8Checkpoint.open(
        tmp_path, fuse=True, through_float16=True, keeps_equal_scales=keeps
    ) as checkpoint:
        assert checkpoint.read(name).tolist() == (EXACT if is_exact else AFTER_FP16)


def test_fp8_is_told_by_headers_alone(tmp_path: Path) -> None:
    fp8 = save(tmp_path / "fp8", linear(scale=HALF), None)
    assert is_fp8_checkpoint(fp8)
    plain = save(tmp_path / "plain", {WEIGHT: torch.ones(2, 4, dtype=torch.bfloat16)}, CT_STATIC)
    assert not is_fp8_checkpoint(plain)
    fp4 = {
        f"{LINEAR}.weight": torch.zeros(2, 4, dtype=torch.uint8),
        f"{LINEAR}.weight_scale": codes(CODES),
        "model.layers.0.self_attn.k_zero_point": codes([[0]]).reshape(1),
    }
    assert not is_fp8_checkpoint(save(tmp_path / "fp4", fp4, None))
    rank = {
        "transformer.layers.0.attention.qkv.weight": codes(CODES),
        "transformer.layers.0.attention.qkv.weights_scaling_factor": HALF,
    }
    (tmp_path / "trtllm").mkdir()
    save_file(rank, tmp_path / "trtllm" / "rank0.safetensors")
    assert not is_fp8_checkpoint(tmp_path / "trtllm")
    assert not is_fp8_checkpoint(tmp_path / "nowhere")
    assert not is_fp8_checkpoint(fp8 / "model.safetensors")
    (tmp_path / "empty").mkdir()
    assert not is_fp8_checkpoint(tmp_path / "empty")


def test_fp8_is_told_even_where_a_shard_is_missing(tmp_path: Path) -> None:
    save(tmp_path, ALONE, AUTOFP8_DYNAMIC)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    shards = {WEIGHT: "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert is_fp8_checkpoint(tmp_path)


@pytest.mark.parametrize("form", ["compressed-tensors", "autofp8", "modelopt", "modelopt, older"])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_block_of_128_by_128_shares_a_scale_and_the_last_may_be_smaller(
    tmp_path: Path, form: str, fuse: bool
) -> None:
    weight, scale, expected = _make_blocks()
    config = {
        "compressed-tensors": CT_BLOCK,
        "autofp8": FINEGRAINED,
        "modelopt": modelopt("fp8_pb_wo"),
        "modelopt, older": modelopt("MIXED_PRECISION")
        | {"quantized_layers": {LINEAR: {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}}},
    }[form]
    name = f"{LINEAR}.weight_scale_inv" if form == "autofp8" else f"{LINEAR}.weight_scale"
    stored = scale.reshape(2, 1, 3, 1) if form == "modelopt" else scale
    checkpoint = _open(tmp_path, linear(weight=weight) | {name: stored}, config, fuse=fuse)
    assert torch.equal(checkpoint.read(WEIGHT), expected)
    for start, stop in ((0, 130), (127, 129), (129, 130), (5, 5)):
        assert torch.equal(checkpoint.read_rows(WEIGHT, start, stop), expected[start:stop])
    assert find_inputs(checkpoint, WEIGHT) == GROUP
    assert form.startswith(checkpoint.dialect.name)
    assert torch.equal(checkpoint.weight_scale(WEIGHT), stored)


SCALE = f"{LINEAR}.weight_scale"


def _read_all(folder: Path) -> None:
    with Fp8Checkpoint.open(folder, fuse=True) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)
            if name in checkpoint.quantized:
                checkpoint.weight_scale(name)
                checkpoint.scheme(name)


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


@pytest.mark.parametrize("case", CASES["refused"])
def test_a_fault_is_refused_by_name(tmp_path: Path, case: str) -> None:
    row = CASES["refused"][case]
    error = _refuse(tmp_path, make_tensors(row["tensors"]), find_config(row["config"]))
    assert row["says"] in error.message
    assert error.hint or not row.get("hint")


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    tensors = linear(scale=HALF) | {"model.norm.weight": torch.ones(2)}
    checkpoint = Fp8Checkpoint.open(save(tmp_path, tensors, AUTOFP8_DYNAMIC), fuse=False)
    readers: tuple[Callable[[str], object], ...] = (
        checkpoint.read,
        checkpoint.dtype,
        lambda name: checkpoint.read_rows(name, 0, 1),
    )
    for read in readers:
        for name in ("model.nowhere.weight", SCALE):
            with pytest.raises(ModelError, match=name):
                read(name)
