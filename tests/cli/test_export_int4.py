"""`export --format rfc --with-weights` of int4 checkpoints: the same numbers, in FP8."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.cli.program import succeed
from tests.int4_by_hand import quantize

CALIBRATE = ("--samples", 4, "--seq-len", 30, "--dtype", "float32", "--recipe", "w8a8-static")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate a llama once: `model` and `stats.safetensors` in a folder."""
    return calibrate("llama", tmp_path_factory.mktemp("llama"))


def calibrate(family: str, folder: Path, **changes: Any) -> Path:
    zoo.save(family, folder / "model", **changes)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [*range(3, 33)]}) + "\n" for _ in range(4)))
    command = ("calibrate", folder / "model", "--data", rows, *CALIBRATE, "--format", "rfc")
    succeed(*command, "--out", folder / "out")
    shutil.move(folder / "out" / "stats.safetensors", folder / "stats.safetensors")
    return folder


def export(folder: Path, model: Path, out: Path, *options: object) -> Any:
    """Export with weights, and give what the program says."""
    command = ("export", folder / "stats.safetensors", "--format", "rfc", "--with-weights")
    return succeed(*command, "--model", model, "--out", out, "--json", *options).json


def test_the_other_fingerprint_is_said_and_not_refused(llama: Path, tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    quantize(llama / "model", tmp_path / "int4", inputs=inputs, packed=False)
    said = export(llama, tmp_path / "int4", tmp_path / "rfc")["warnings"]
    assert "so its int4 weights are assumed to come from it" in said[0]
    assert "different config.json" in said[0]
    assert "different weights" in said[0]


def test_what_is_not_quantized_is_rounded_to_fp8_as_ever(llama: Path, tmp_path: Path) -> None:
    """One weight has grown since it was calibrated: its scale is that of the weight at hand."""
    int4 = quantize(llama / "model", tmp_path / "int4", ignore="self_attn|layers.0.mlp.up_proj")
    grown = "model.layers.1.self_attn.o_proj"
    tensors = load_file(tmp_path / "int4" / "model.safetensors")
    tensors[f"{grown}.weight"] *= 4  # no other codes
    save_file(tensors, tmp_path / "int4" / "model.safetensors")
    export(llama, tmp_path / "int4", tmp_path / "int4-rfc", "--tp", 2)
    export(llama, llama / "model", tmp_path / "plain-rfc", "--tp", 2)
    for rank in range(2):
        name = f"rfc.tp2.rank{rank}.safetensors"
        found, plain = (load_file(tmp_path / folder / name) for folder in ("int4-rfc", "plain-rfc"))
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            module, _, kind = key.rpartition(".")
            if f"{module}.weight" in int4 and kind != "input_scale":
                continue
            if key == f"{grown}.weight_scale":
                own = tensors[f"{grown}.weight"].numpy()[:, 16 * rank : 16 * rank + 16]
                assert found[key].item() == np.abs(own).max() / np.float32(448)
            else:
                assert torch.equal(found[key].float(), value.float()), key
