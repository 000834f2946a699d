"""`export --format rfc --with-weights`: the weights of every rank, cut and quantized by hand."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.cli.program import succeed

CALIBRATE = ("--samples", 4, "--seq-len", 30, "--dtype", "float32", "--recipe", "kv")
Weights = dict[str, np.ndarray]


def calibrated(family: str, folder: Path, **changes: Any) -> tuple[Path, Path, Weights]:
    """Give a model's folder, its statistics, and its parameters."""
    model = zoo.save(family, folder / "model", **changes)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [*range(3, 33)]}) + "\n" for _ in range(4)))
    command = ("calibrate", folder / "model", "--data", rows, *CALIBRATE, "--format", "rfc")
    succeed(*command, "--out", folder / "out")
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return folder / "model", folder / "out" / "stats.safetensors", weights


def export(folder: Path, model: Path, stats: Path, *options: object) -> list[str]:
    command = ("export", stats, "--format", "rfc", "--model", model, "--with-weights", *options)
    files: list[str] = succeed(*command, "--out", folder, "--json").json["files"]
    return files


def check_weight(stored: dict[str, torch.Tensor], name: str, expected: np.ndarray) -> None:
    """Compare codes and scale of one projection on one rank."""
    scale = np.float32(np.abs(expected).max()) / np.float32(448)
    assert stored[f"{name}.weight_scale"].dtype is torch.float32
    assert stored[f"{name}.weight_scale"].item() == scale, name
    codes = np.clip(expected / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    found = stored[f"{name}.weight"]
    assert found.dtype is torch.float8_e4m3fn
    assert np.array_equal(found.view(torch.uint8).numpy(), codes), name


def of_rank(count: int, rank: int) -> slice:
    """Give the half of `count` that a rank of two owns."""
    return slice(rank * count // 2, (rank + 1) * count // 2)


def test_every_rank_has_its_part_and_its_scales(tmp_path: Path) -> None:
    model, stats, weights = calibrated("llama", tmp_path)
    files = export(tmp_path / "rfc", model, stats, "--tp", 1, "--tp", 2)
    names = [f"rfc.tp{tp}.rank{rank}.safetensors" for tp in (1, 2) for rank in range(tp)]
    assert files == sorted(["rfc.tp1.json", "rfc.tp2.json", *names])
    document = json.loads((tmp_path / "rfc" / "rfc.tp2.json").read_text())
    assert document["quantized_weights"] == {"rank0": names[1], "rank1": names[2]}
    for rank in range(2):
        stored = load_file(tmp_path / "rfc" / names[1 + rank])
        assert len(stored) == 2 * 7 * 3
        for layer in range(2):
            path = f"model.layers.{layer}"
            for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
                whole = weights[f"{path}.{name}.weight"]
                check_weight(stored, f"{path}.{name}", whole[of_rank(len(whole), rank)])
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                whole = weights[f"{path}.{name}.weight"]
                check_weight(stored, f"{path}.{name}", whole[:, of_rank(whole.shape[1], rank)])
            for section, module in (("mlp", "mlp"), ("attention", "self_attn")):
                for side, suffix in (("weight", "weight_scale"), ("activation", "input_scale")):
                    factors = document[section][side]["scaling_factor"][f"rank{rank}"]
                    for key, value in factors[str(layer)].items():
                        found = stored[f"{path}.{module}.{key}.{suffix}"].item()
                        assert found == pytest.approx(value, rel=1e-7)


def test_fnuz_codes_are_those_of_its_own_format(tmp_path: Path) -> None:
    model, stats, weights = calibrated("llama", tmp_path)
    export(tmp_path / "rfc", model, stats, "--fp8-dtype", "e4m3fnuz")
    stored = load_file(tmp_path / "rfc" / "rfc.tp1.rank0.safetensors")
    whole = weights["model.layers.0.mlp.up_proj.weight"]
    scale = np.float32(np.abs(whole).max()) / np.float32(240)
    expected = np.clip(whole / scale, -240, 240).astype(ml_dtypes.float8_e4m3fnuz)
    found = stored["model.layers.0.mlp.up_proj.weight"]
    assert found.dtype is torch.float8_e4m3fnuz
    assert np.array_equal(found.view(torch.uint8).numpy(), expected.view(np.uint8))
