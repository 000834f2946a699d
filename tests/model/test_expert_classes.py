"""Stacks of experts, and buffers, as transformers' class of the model has them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.quantization.select import find_selection
from tests.architectures import families
from tests.quantization.by_hand import run


def test_a_buffer_is_no_stack_of_weights(tmp_path: Path) -> None:
    """The published block of MiniMax has 256 rows; a kernel's sides are shorter than 16."""
    changes = {**families.REFUSED["minimax"][0], "block_size": 32}
    families.save("minimax", changes, tmp_path / "m")
    name = "model.layers.0.self_attn.diagonal_decay"
    written = run(tmp_path / "m", tmp_path / "fp8", "fp8-dynamic").tensors()
    assert torch.equal(written[name], load_file(tmp_path / "m" / "model.safetensors")[name])
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        reasons = {each.module: each.why for each in find_selection(checkpoint).unquantized}
    assert "a buffer" in reasons[name]


def test_other_stacks_of_a_known_class_are_left(tmp_path: Path) -> None:
    """Inkling's shared experts are a tensor of matrices, which no router chooses."""
    families.save("inkling_text", {**families.EXPERTS, "intermediate_size": 32}, tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        found = find_selection(checkpoint)
    left = {each.module: each.why for each in found.unquantized}
    assert "several matrices" in left["model.layers.0.mlp.shared_experts.down_proj"]
    assert found.refusal is None
    assert any(".experts.0.gate_proj" in each.module for each in found.quantized)
