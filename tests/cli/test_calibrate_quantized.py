"""`calibrate` and `verify` of a model that exists only quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.calibration.calibration_stats import load_stats_file
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.quantization.sources.decoded import open_model
from tests.cli.conftest import write_rows
from tests.cli.program import fail, succeed
from tests.cli.quantized_children import (
    BASE,
    save_child,
    save_fp4,
    save_int,
)
from tests.kit.checkpoints import change_tensors

OPTIONS = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")
WHOLE_BYTES = "fp8calib.calibration.memory_plan.whole_bytes"
FORMS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "channels": (lambda folder: save_child("compressed-tensors", folder), "FP8 weights"),
    "blocks": (lambda folder: save_child("autofp8", folder), "FP8 weights (autofp8)"),
    "ModelOpt": (lambda folder: save_child("ModelOpt", folder), "FP8 weights (modelopt)"),
    "Quark": (lambda folder: save_child("Quark", folder), "FP8 weights (quark)"),
    "int8": (lambda folder: save_int(folder, 8), "INT8 weights (compressed-tensors)"),
    "int4": (lambda folder: save_int(folder, 4), "INT4 weights"),
    "nvfp4": (lambda folder: save_fp4(folder, "nvfp4"), "NVFP4 weights"),
    "mxfp4": (lambda folder: save_fp4(folder, "mxfp4"), "MXFP4 weights"),
    "ModelOpt, nvfp4": (lambda folder: save_fp4(folder, "modelopt"), "NVFP4 weights"),
    "int4, groups": (lambda folder: save_int(folder, 4, group=32), "INT4 weights"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"input_ids": [(7 * i * j + i) % 64 for j in range(16)]} for i in range(1, 5)]
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def dequantize(child: Path, folder: Path) -> Path:
    """Write the unquantized model that a child holds, as `tests/quantization` proves it."""
    shutil.copytree(BASE, folder)
    with open_model(child, if_quantized="") as opened:
        return change_tensors(folder, lambda _: {n: opened.read(n) for n in opened.tensors})


@pytest.mark.parametrize("form", FORMS)
def test_the_statistics_are_those_of_the_dequantized_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    make, described = FORMS[form]
    child = make(tmp_path / "child")
    plain = dequantize(child, tmp_path / "dequantized")
    outs = {}
    for name, model in (("plain", plain), ("whole", child), ("streamed", child)):
        if name == "streamed":
            monkeypatch.setattr(WHOLE_BYTES, lambda _: {"weights": 2**60})  # nothing fits
        command = ("calibrate", model, "--data", data, *OPTIONS, "--format", "kv-overlay")
        report = succeed(*command, "--out", tmp_path / name, "--json").json
        outs[name] = load_file(tmp_path / name / "stats.safetensors")
        assert report["memory"]["streamed"] is (name == "streamed")
        assert report["measured_quantized"].startswith("" if name == "plain" else described)
        assert bool(report["measured_quantized"]) is (name != "plain")
    assert outs["plain"].keys() == outs["whole"].keys() == outs["streamed"].keys()
    for name, values in outs["plain"].items():
        assert torch.equal(values, outs["whole"][name]), name
        assert torch.equal(values, outs["streamed"][name]), name
    header = load_stats_file(tmp_path / "whole").header
    assert header.measured_quantized.startswith(described)
    shard = next((tmp_path / "whole" / "kv-overlay").glob("*-00002-of-00002.safetensors"))
    fits = json.loads(TensorFile(shard).header.metadata["fp8calib.fits"])
    assert fits["measured_quantized"] == header.measured_quantized
    assert any("is quantized already" in warning for warning in report["warnings"])
    again = ("export", tmp_path / "whole", "--format", "kv-overlay", "--model", child)
    succeed(*again, "--out", tmp_path / "again")


# --- what cannot be read ----------------------------------------------------------------------


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_zero_point": torch.zeros(9, 1, dtype=torch.int32)}, "is I32 [9, 1] for scales"),
        ({"weight_scale": torch.ones(128, 3)}, "has shape [128, 3] for a weight [128, 32]"),
        ({"weight_scale": torch.full((128, 1), torch.nan)}, "holds what is not a scale"),
        ({"weight_scale": None}, "weight_scale is missing"),
        ({"weight_shape": torch.tensor([128, 64])}, "not integers of 4 or 8 bits"),
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
