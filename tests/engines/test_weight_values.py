"""`check --read-weights`: NaN, infinity and rows of zeros, in every dtype of floats."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.commands.request import PythonReporter
from fp8calib.engines import weight_values
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import CheckReport, EngineReport, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.engines.weight_values import WeightValues, read_weight_values
from tests import zoo
from tests.cli.program import run, succeed

FOREIGN = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
}
NAME = "model.layers.1.mlp.up_proj.weight"


def read(folder: Path) -> WeightValues:
    return read_weight_values(open_folder(folder), PythonReporter(None))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("values") / "llama"
    zoo.save("llama", folder)
    return folder


def store(llama: Path, out: Path, tensor: torch.Tensor) -> Path:
    out.mkdir()
    (out / "config.json").write_text((llama / "config.json").read_text())
    save_file({NAME: tensor}, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("dtype", FOREIGN)
def test_every_code_is_judged_as_ml_dtypes_reads_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(weight_values, "_AT_ONCE_BYTES", 100)  # several pieces
    bits = np.arange(256, dtype=np.uint8)
    codes = bits if dtype.startswith("F8") else np.repeat(bits, 8).view(np.uint8)
    values = codes.view(FOREIGN[dtype])
    tensor = torch.from_numpy(codes.copy()).view(TORCH_DTYPES[dtype]).reshape(8, -1)
    wrong = ~np.isfinite(values.astype(np.float64))
    found = read(store(llama, tmp_path / "model", tensor))
    if not wrong.any():
        assert found.faults == ()
        return
    place = [int(each) for each in np.unravel_index(wrong.argmax(), tensor.shape)]
    what = "NaN" if np.isnan(values[wrong.argmax()].astype(np.float64)) else "infinity"
    assert found.faults == (
        f"{NAME} holds {what} at {place}: {wrong.sum():,} of its {wrong.size:,} values are not "
        "finite",
    )


def test_a_nan_fails_and_rows_of_zeros_are_told(llama: Path) -> None:
    path = llama / "model.safetensors"
    assert read(llama) == WeightValues(faults=(), clipped=(), notes=())
    out = succeed("check", llama, "--read-weights").out
    assert "--read-weights" not in out
    assert "--read-weights" in succeed("check", llama).out
    tensors = load_file(path)
    tensors[NAME][3:5] = 0
    tensors["model.embed_tokens.weight"][7, 2] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    outcome = run("check", llama, "--read-weights")
    found = outcome.out
    assert outcome.code == 8
    assert "weights bad: model.embed_tokens.weight holds infinity at [7, 2]: 1 of its" in found
    assert f"note: {NAME}: 2 of its rows are zeros" in found
    succeed("check", llama)
    empty = "model.layers.1.mlp.gate_proj.weight"
    tensors[empty].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    found = run("check", llama, "--read-weights").out
    assert f"note: {empty}: all of it is zeros; {NAME}: 2 of its rows are zeros" in found


def test_a_fault_beside_another_one_is_told() -> None:
    other = LoadVerdict(status=Status.MISREAD, why="another fault")
    report = CheckReport(engines={"x": EngineReport(layers=(), weights=other)}, versions={"x": "1"})
    amended = WeightValues(faults=("a holds NaN",), clipped=(), notes=()).amend(report).engines["x"]
    assert amended.weights == other
    assert amended.problems == ("a holds NaN",)


@pytest.mark.parametrize(
    ("factor", "is_ternary", "is_told"),
    [(1, False, False), (2, False, True), (16, False, True), (2, True, False)],
)
def test_codes_that_a_small_scale_clipped_are_told(
    llama: Path, tmp_path: Path, factor: float, is_ternary: bool, is_told: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    weight = weight.sign() if is_ternary else weight
    scale = weight.abs().amax(1, keepdim=True) / 448 / factor
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    found = read(store(llama, tmp_path / "model", codes))
    assert bool(found.clipped) == is_told
    report = CheckReport(engines={"x": EngineReport(layers=())}, versions={"x": "1"})
    suspicious = found.amend(report).engines["x"].suspicious
    assert [f"of {NAME} has the largest code" in each for each in suspicious] == [True] * is_told
