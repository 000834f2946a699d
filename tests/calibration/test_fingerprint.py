"""Fingerprints: of the weights, not of their files."""

from importlib.util import find_spec
from pathlib import Path

import PIL
import pytest
import soundfile
import soxr
import torch
from safetensors.torch import save_file

from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.unquantized_tensors import measure_distance, sketch_matrix
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.modality import Modality
from fp8calib.errors import ModelError

CONFIG = {"model_type": "llama", "hidden_size": 4}
WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "b.weight": torch.ones(4096, dtype=torch.bfloat16),
    "c.bias": torch.zeros(0),
}


def fingerprint(
    folder: Path,
    weights: dict[str, torch.Tensor] = WEIGHTS,
) -> str:
    with save(folder, **weights) as checkpoint:
        return fingerprint_model(CONFIG, checkpoint)


@pytest.mark.parametrize(
    "changed",
    [
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"] + 1},
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].reshape(4, 3)},
        {**WEIGHTS, "b.weight": WEIGHTS["b.weight"].to(torch.float16)},
        {**WEIGHTS, "d.weight": torch.ones(1)},
        {name: value for name, value in WEIGHTS.items() if name != "c.bias"},
        {"z.weight" if name == "a.weight" else name: value for name, value in WEIGHTS.items()},
    ],
    ids=["values", "shape", "dtype", "one more", "one less", "a name"],
)
def test_another_model_has_another_fingerprint(
    tmp_path: Path, changed: dict[str, torch.Tensor]
) -> None:
    assert fingerprint(tmp_path / "changed", changed) != fingerprint(tmp_path / "whole")


def test_versions_of_what_reads_media_are_those_that_are_installed() -> None:
    text = versions([Modality.TEXT])
    seen, heard = (versions([kind]) for kind in (Modality.IMAGE, Modality.AUDIO))
    assert text == versions()
    assert heard == {**text, "soundfile": soundfile.__version__, "soxr": soxr.__version__}
    assert seen.pop("pillow") == PIL.__version__
    assert seen.keys() - text.keys() == ({"torchvision"} if find_spec("torchvision") else set())


# --- sketches of linears -------------------------------------------------------------------------


def draw(seed: int, rows: int = 4500, columns: int = 256) -> torch.Tensor:
    """Draw a matrix whose rows have different sizes; it has more rows than are read at once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator).exp()
    return torch.randn(rows, columns, generator=generator) * sizes


def save(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [0.02, 0.1, 0.4, 1.4])
def test_a_distance_is_estimated(tmp_path: Path, seed: int, size: float) -> None:
    """Compared with the Frobenius norm of the difference."""
    base = draw(seed)
    noise = draw(seed + 100)
    other = base + noise * (size * base.norm() / noise.norm())
    expected = float((other - base).norm() / other.norm())
    with save(tmp_path / "x", base=base, other=other) as checkpoint:
        recorded = sketch_matrix(checkpoint, "base")[0]
        assert measure_distance(recorded, checkpoint, "base") == 0
        assert measure_distance(recorded, checkpoint, "other") == pytest.approx(expected, rel=0.4)


def test_the_vectors_never_change(tmp_path: Path) -> None:
    """Files hold sketches: the signs of 32 columns, each the only entry of a row."""
    entry = torch.eye(32)
    with save(tmp_path / "x", a=entry) as checkpoint:
        found = sketch_matrix(checkpoint, "a")[0]
    assert found == f"rows:{RECORDED}"


RECORDED = (
    "gL+AP4C/gD+AP4A/gD+AP4A/gL+Av4C/gL+Av4A/gL+AP4A/gL+Av4C/gL+AP4C/gD+AP4C/gD+AP4C/gL+APw=="
)


@pytest.mark.parametrize("text", ["", "AAAA", "#", "gH+A" * 21 + "gA=="])
def test_a_damaged_sketch_is_refused(tmp_path: Path, text: str) -> None:
    with (
        save(tmp_path / "x", a=torch.eye(32)) as checkpoint,
        pytest.raises(ModelError, match=r"damaged: sketch of a: .*(not 32|adding|ase64|buffer)"),
    ):
        measure_distance(f"rows:{text}", checkpoint, "a")
