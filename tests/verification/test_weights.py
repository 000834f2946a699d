"""Which weights belong together, and weights taken from an FP8 checkpoint that was made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.numerics.schemes import find_scheme
from fp8calib.verification.emulation.candidate import Candidate
from tests import zoo
from tests.kit.checkpoints import change_config
from tests.verification.by_hand import (
    Subject,
    cast,
    cast_blocks,
    cast_groups,
    ceil_log2,
    emulate,
    emulate_checkpoint,
    make_batch,
    opened,
    plain_forward,
    plan_scheme,
    tensor_scale,
)
from tests.verification.models_by_hand import ROUTERS, Recipe, quantize_by_hand
from tests.verification.test_emulation_linears import weights_held

BATCH = make_batch([5, 20, 13])
GROUPS = {
    "llama": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ],
    "phi3": [
        ["self_attn.o_proj"],
        ["self_attn.qkv_proj"],
        ["mlp.gate_up_proj"],
        ["mlp.down_proj"],
    ],
    "opt": [
        ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"],
        ["self_attn.out_proj"],
        ["fc1"],
        ["fc2"],
    ],
    "starcoder2": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.c_fc"],
        ["mlp.c_proj"],
    ],
    "mixtral": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.experts.gate_up_proj"],
        ["mlp.experts.down_proj"],
    ],
    "deepseek_v3": [
        ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
        ["self_attn.q_b_proj"],
        ["self_attn.kv_b_proj"],
        ["self_attn.o_proj"],
        ["mlp.experts.gate_up_proj"],
        ["mlp.experts.down_proj"],
        ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
        ["mlp.shared_experts.down_proj"],
    ],
    "qwen3_next": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.experts.gate_up_proj"],
        ["mlp.experts.down_proj"],
        ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
        ["mlp.shared_expert.down_proj"],
    ],
}


@pytest.mark.parametrize("family", GROUPS)
def test_what_engines_load_into_one_weight_is_one_group(family: str, tmp_path: Path) -> None:
    """Of the last layer; nothing else is in a group, and routers are in none."""
    with opened(zoo.build(family), tmp_path / "m") as subject:
        planned = plan_scheme(subject, find_scheme("w8a16")).weights
    groups = [each.parameters for each in planned]
    prefix = f"{subject.geometry.layers[-1].module}."
    found = [
        [p.name.removeprefix(prefix).removesuffix(".weight") for p in group]
        for group in groups
        if group[0].name.startswith(prefix)
    ]
    assert found == GROUPS[family]


@pytest.mark.parametrize("family", sorted(zoo.ZOO))
def test_every_matrix_of_the_layers_is_quantized_or_a_router(family: str, tmp_path: Path) -> None:
    """A list made by hand of what stays: routers, and what is no projection."""
    with opened(zoo.build(family), tmp_path / "m") as subject:
        planned = plan_scheme(subject, find_scheme("w8a16")).weights
    parameters = [parameter for each in planned for parameter in each.parameters]
    listed = [parameter.name for parameter in parameters if parameter.sites]
    assert len(listed) == len(set(listed))
    layers = tuple(f"{layer.module}." for layer in subject.geometry.layers)
    left = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, parameter in subject.model.named_parameters()
        if name.startswith(layers) and parameter.ndim > 1 and name not in listed
    }
    assert left <= {*ROUTERS, "conv1d", "experts"}
    biases = {
        name
        for name, parameter in subject.model.named_parameters()
        if "experts" in name and parameter.ndim > 1 and name not in listed
    }
    assert all("bias" in n or "shared_expert_gate" in n for n in biases)


# --- an FP8 checkpoint -------------------------------------------------------------------------


def write_blocks(model: nn.Module, folder: Path) -> Path:
    """Write a model as DeepSeek does: codes, and a scale per block of 128 x 128."""
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name]
        scales = [
            [tensor_scale(piece) for piece in strip.split(128, 1)] for strip in weight.split(128, 0)
        ]
        spread = torch.tensor(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.tensor(scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return change_config(folder, quantization_config={**section, "weight_block_size": [128, 128]})


def stored(subject: Subject, folder: Path, numerics: Numerics) -> Candidate:
    """Ask the product what an engine makes of a checkpoint."""
    checkpoint = Fp8Checkpoint.open(folder, fuse=numerics.fused_share_scales)
    return emulate_checkpoint(subject, checkpoint, numerics)


def test_a_checkpoint_of_blocks_is_what_quantizing_by_hand_gives(
    wide: Subject, tmp_path: Path
) -> None:
    folder = write_blocks(wide.model, tmp_path / "fp8")
    expected = quantize_by_hand(
        wide.model, Recipe(lambda weight, _: cast_blocks(weight), lambda _: cast_groups)
    )
    (found,) = emulate(wide, stored(wide, folder, find_emulated("reference")[1]), BATCH)
    assert torch.equal(found, plain_forward(expected, BATCH))
    assert not torch.equal(found, plain_forward(wide.model, BATCH))


def test_vllm_quantizes_the_blocks_of_a_checkpoint_again(wide: Subject, tmp_path: Path) -> None:
    folder = write_blocks(wide.model, tmp_path / "fp8")
    numerics = find_emulated("vllm")[1]
    held = weights_held(wide, stored(wide, folder, replace(numerics, power_of_two_sizes=(1, 1))))
    name = "model.layers.1.mlp.gate_proj.weight"
    strips = []
    for strip in cast_blocks(wide.model.get_parameter(name).detach()).split(128, 0):
        pieces = [
            cast(piece, 2.0 ** ceil_log2(tensor_scale(piece))) for piece in strip.split(128, 1)
        ]
        strips.append(torch.cat(pieces, 1))
    assert torch.equal(held[name], torch.cat(strips, 0))
    ragged = weights_held(wide, stored(wide, folder, numerics))
    assert torch.equal(ragged[name], cast_blocks(wide.model.get_parameter(name).detach()))
