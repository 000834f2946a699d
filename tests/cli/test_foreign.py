"""`calibrate` measures what ModelOpt measured on the same tokens."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.formats.foreign import FOLDER, LLAMA_ATTENTION, load_kv_scales


def test_modelopt_measures_the_scales_that_calibrate_measures(tmp_path: Path) -> None:
    tokens = torch.randint(3, 64, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row} for row in tokens])
    command = ("calibrate", FOLDER / "llama", "--data", rows, "--seq-len", 32)
    options = ("--dtype", "bfloat16", "--format", "kv-scales", "--out", tmp_path / "out")
    succeed(*command, *options)
    ours = load_file(tmp_path / "out" / "kv_scales.safetensors")
    # within one step of bf16: another processor may sum in another order
    for layer, theirs in enumerate(load_kv_scales("modelopt-kv")):
        for role, expected in zip("kv", theirs, strict=True):
            found = ours[f"{LLAMA_ATTENTION.format(layer)}.{role}_scale"].item()
            assert expected == [pytest.approx(found, rel=2.0**-7)]
