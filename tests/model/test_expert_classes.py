"""Stacks of experts, and buffers, as transformers' class of the model has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.model.expert_classes import ClassStacks, ask_class
from fp8calib.model.expert_layouts import EXPERT_LAYOUTS, ExpertLayout, Order
from fp8calib.quantization.select import find_selection
from tests import zoo
from tests.architectures import families
from tests.kit.checkpoints import change_config
from tests.quantization.by_hand import run
from tests.quantization.stacked import STACKED

TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "granitemoe_swa": (families.EXPERTS, "model.layers.1.block_sparse_moe.experts"),
    "hy_v4": (families.EXPERTS, "model.layers.1.mlp.experts"),
    "minimax_m3_vl_text": (families.EXPERTS, "model.layers.1.mlp.experts"),
}
"""Types that no table has: what makes a tiny one, and where its experts are."""


def ask(folder: Path) -> ClassStacks:
    return ask_class(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("name", TYPES)
def test_experts_of_types_that_no_table_has_are_written_one_by_one(
    tmp_path: Path, name: str
) -> None:
    assert name not in EXPERT_LAYOUTS
    changes, path = TYPES[name]
    families.save(name, changes, tmp_path / "m")
    before = load_file(tmp_path / "m" / "model.safetensors")
    written = run(tmp_path / "m", tmp_path / "fp8", "fp8-dynamic").tensors()
    gate_up, down = before[f"{path}.gate_up_proj"], before[f"{path}.down_proj"]
    for expert in range(len(down)):
        gate, up = gate_up[expert].chunk(2)
        for projection, whole in (
            ("gate_proj", gate),
            ("up_proj", up),
            ("down_proj", down[expert]),
        ):
            module = f"{path}.{expert}.{projection}"
            found = written[f"{module}.weight"]
            assert found.dtype is torch.float8_e4m3fn
            values = found.float() * written[f"{module}.weight_scale"]
            torch.testing.assert_close(values, whole.float(), rtol=0.07, atol=2e-3)


@pytest.mark.parametrize("name", STACKED)
def test_classes_agree_with_the_table(tmp_path: Path, name: str) -> None:
    """Llama 4's experts have no flags: of them a class tells nothing."""
    family = STACKED[name]
    family.build(name).config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    layout = ask(tmp_path).layout
    if layout is None:
        assert name.startswith("llama4")
        return
    known = EXPERT_LAYOUTS.get(name, ExpertLayout())
    assert layout.order is known.order or known.order is Order.EITHER


def test_a_class_whose_rows_alternate_has_no_layout(tmp_path: Path) -> None:
    zoo.save("gpt_oss", tmp_path / "m")
    assert ask(tmp_path / "m").layout is None


def test_of_a_type_that_transformers_lacks_nothing_is_known(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "m")
    change_config(tmp_path / "m", model_type="nobody")
    assert ask(tmp_path / "m") == ClassStacks()


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
