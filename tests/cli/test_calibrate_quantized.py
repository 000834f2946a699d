"""`calibrate` and `verify` of a model that exists only quantized."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fp8calib.commands.model import open_model
from tests.cli.conftest import write_rows
from tests.cli.program import fail
from tests.cli.quantized_children import (
    BASE,
    save_int,
)
from tests.kit.checkpoints import change_tensors

OPTIONS = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"input_ids": [(7 * i * j + i) % 64 for j in range(16)]} for i in range(1, 5)]
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def dequantize(child: Path, folder: Path) -> Path:
    """Write the unquantized model that a child holds, as `tests/quantization` proves it."""
    shutil.copytree(BASE, folder)
    with open_model(child, if_quantized="") as opened:
        return change_tensors(folder, lambda _: {n: opened.read(n) for n in opened.tensors})


# --- what cannot be read ----------------------------------------------------------------------


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"weight_zero_point": torch.zeros(9, 1, dtype=torch.int32)},
            "is I32 [9, 1], expected zero points",
        ),
        (
            {"weight_scale": torch.ones(128, 3)},
            "is F32 [128, 3], expected float scales",
        ),
        ({"weight_scale": torch.full((128, 1), torch.nan)}, "holds what is not a scale"),
        ({"weight_scale": None}, "weight_scale is missing"),
        ({"weight_shape": torch.tensor([128, 64])}, "expected integers of 4 or 8 bits"),
    ],
)
def test_integers_that_do_not_fit_are_named(
    data: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], says: str
) -> None:
    child = save_int(tmp_path / "child", 4)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {f"{Q}.{leaf}": tensor for leaf, tensor in changes.items()}
        return {name: t for name, t in {**tensors, **named}.items() if t is not None}

    change_tensors(child, change)
    out = ("--out", tmp_path / "out")
    assert says in fail(4, "calibrate", child, "--data", data, *OPTIONS, *out)
