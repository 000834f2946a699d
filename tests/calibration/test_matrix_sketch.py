"""Sketches estimate the distance of two matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.calibration.unquantized_tensors import (
    decode_sketch,
    encode_sketch,
    measure_distance,
    sketch_matrix,
)
from fp8calib.checkpoint.checkpoint import Checkpoint


def draw(seed: int, rows: int = 4500, columns: int = 256) -> torch.Tensor:
    """Draw a matrix whose rows have different sizes; it has more rows than are read at once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator).exp()
    return torch.randn(rows, columns, generator=generator) * sizes


def save(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [0.02, 0.1, 0.4, 1.4])
def test_a_distance_is_estimated(tmp_path: Path, seed: int, size: float) -> None:
    """Compared with the Frobenius norm of the difference."""
    base = draw(seed)
    noise = draw(seed + 100)
    other = base + noise * (size * base.norm() / noise.norm())
    expected = float((other - base).norm() / other.norm())
    with save(tmp_path / "x", base=base, other=other) as checkpoint:
        recorded = decode_sketch(encode_sketch(sketch_matrix(checkpoint, "base")[0]))
        assert measure_distance(recorded, checkpoint, "base") == 0
        assert measure_distance(recorded, checkpoint, "other") == pytest.approx(expected, rel=0.4)


def test_the_vectors_never_change(tmp_path: Path) -> None:
    """Files hold sketches: the signs of 32 columns, each the only entry of a row."""
    entry = torch.eye(32)
    with save(tmp_path / "x", a=entry) as checkpoint:
        found = encode_sketch(sketch_matrix(checkpoint, "a")[0])
    assert found == RECORDED


RECORDED = (
    "gL+AP4C/gD+AP4A/gD+AP4A/gL+Av4C/gL+Av4A/gL+AP4A/gL+Av4C/gL+AP4C/gD+AP4C/gD+AP4C/gL+APw=="
)


@pytest.mark.parametrize("text", ["", "AAAA", "#", "gH+A" * 21 + "gA=="])
def test_a_damaged_sketch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not 32|padding|base64|buffer"):
        decode_sketch(text)
