"""Hashes of what quantization keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.stats.unquantized_tensors import compare_with_base, hash_unquantized

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
    """Save a checkpoint, and hash it."""
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
    monkeypatch.setattr("fp8calib.stats.unquantized_tensors._ELEMENTS_AT_ONCE", 1000)
    converted = {name: tensor.to(dtype) for name, tensor in make().items()}
    assert hash_saved(tmp_path / "other", converted) == base
