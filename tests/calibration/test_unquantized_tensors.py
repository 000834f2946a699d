"""Hashes of what quantization keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.calibration.unquantized_tensors import compare_with_base, hash_unquantized
from fp8calib.checkpoint.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def make(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make an embedding of 6,400 values and a norm, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        EMBEDDING: torch.randn(100, 64, generator=generator),
        NORM: torch.randn(64, generator=generator),
    }
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()} | changes


def hash_saved(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        return hash_unquantized(checkpoint)


@pytest.mark.parametrize("place", [0, 3200, 6399])
def test_every_value_of_an_embedding_counts(tmp_path: Path, place: int) -> None:
    base = hash_saved(tmp_path / "base", make())
    changed = make()[EMBEDDING].clone()
    changed.view(torch.int16).view(-1)[place] += 1
    other = hash_saved(tmp_path / "other", make(**{EMBEDDING: changed}))
    assert other[NORM] == base[NORM]
    assert other[EMBEDDING] != base[EMBEDDING]
    with Checkpoint.open(tmp_path / "other") as checkpoint:
        assert compare_with_base(base, checkpoint).difference == f"its {EMBEDDING} differs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_and_parts_give_the_same_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    base = hash_saved(tmp_path / "base", make())
    monkeypatch.setattr("fp8calib.calibration.unquantized_tensors._ELEMENTS_AT_ONCE", 1000)
    converted = {name: tensor.to(dtype) for name, tensor in make().items()}
    assert hash_saved(tmp_path / "other", converted) == base


def list_sketched(hashes: dict[str, str]) -> list[str]:
    return [name for name, text in hashes.items() if text.startswith("rows:")]


def test_of_the_experts_of_a_layer_one_is_sketched_another_in_each_layer(tmp_path: Path) -> None:
    """Experts 10 and 2 are in the order of numbers; norms, biases and the head are not linears."""
    weight = torch.ones(4, 4)
    experts = [f"model.layers.{n}.mlp.experts.{e}.up.weight" for n in (1, 2) for e in (0, 2, 10)]
    others = ["model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.o_proj.weight"]
    left = {"model.layers.1.mlp.up.bias": torch.ones(4), "lm_head.weight": weight}
    tensors = {name: weight.clone() for name in (*experts, *others)} | left
    found = hash_saved(tmp_path / "base", make(**tensors))
    assert list_sketched(found) == sorted([experts[1], experts[5], *others])


@pytest.mark.parametrize(("expert", "is_seen"), [(0, False), (1, True), (2, False)])
def test_of_a_stack_of_experts_one_is_compared(tmp_path: Path, expert: int, is_seen: bool) -> None:
    """In layer 4 of three experts it is that of 4 mod 3."""
    name = "model.layers.4.mlp.experts.gate_up_proj"
    stack = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    base = hash_saved(tmp_path / "base", make(**{name: stack}))
    changed = stack.clone()
    changed[expert] *= -1
    hash_saved(tmp_path / "other", make(**{name: changed}))
    with Checkpoint.open(tmp_path / "other") as checkpoint:
        found = compare_with_base(base, checkpoint)
    assert bool(found.difference) is is_seen
    assert found.difference.startswith(f"its {name} differs by " if is_seen else "")


def test_rows_all_over_a_linear_are_compared(tmp_path: Path) -> None:
    """A third of the rows is of another matrix."""
    name, large = "model.layers.0.mlp.up_proj.weight", torch.ones(1100, 1024)
    base = hash_saved(tmp_path / "base", make(**{name: large}))
    for number, rows in enumerate((slice(0, 300), slice(400, 700), slice(800, 1100))):
        changed = large.clone()
        changed[rows] *= -1
        folder = tmp_path / str(number)
        hash_saved(folder, make(**{name: changed}))
        with Checkpoint.open(folder) as checkpoint:
            assert name in compare_with_base(base, checkpoint).difference
    with Checkpoint.open(tmp_path / "base") as checkpoint:
        found = compare_with_base(base, checkpoint)
    assert (found.difference, found.compared) == ("", "1 of 1 recorded linears")
