"""`check --read-weights`: NaN, infinity and rows of zeros, in every dtype of floats."""

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
from fp8calib.engines.replay.verdicts import EngineReport, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.engines.weight_values import amend_for_values
from tests import zoo
from tests.cli.program import run, succeed
from tests.kit.checkpoints import change_tensors

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


def read(folder: Path, weights: LoadVerdict | None = None) -> EngineReport:
    report = EngineReport(layers=(), weights=weights)
    return amend_for_values({"": report}, open_folder(folder), PythonReporter(None))[""]


def find_fault(folder: Path) -> str:
    found = read(folder).weights
    return "" if found is None else found.why


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("values") / "llama"
    zoo.save("llama", folder)
    return folder


def store(llama: Path, out: Path, tensor: torch.Tensor) -> Path:
    return store_all(llama, out, {NAME: tensor})


def store_all(llama: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    out.mkdir()
    (out / "config.json").write_text((llama / "config.json").read_text())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
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
    found = find_fault(store(llama, tmp_path / "model", tensor))
    if not wrong.any():
        assert found == ""
        return
    place = [int(each) for each in np.unravel_index(wrong.argmax(), tensor.shape)]
    what = "NaN" if np.isnan(values[wrong.argmax()].astype(np.float64)) else "infinity"
    told = f"{wrong.sum():,} of its {wrong.size:,} values are not finite"
    assert found == f"{NAME} holds {what} at {place}: {told}"


def test_a_nan_fails_and_rows_of_zeros_are_told(llama: Path) -> None:
    path = llama / "model.safetensors"
    assert read(llama) == EngineReport(layers=())
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


def test_a_norm_that_is_not_finite_is_bad_without_reading_weights(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    norm = "model.layers.1.input_layernorm.weight"
    change_tensors(tmp_path / "model", {norm: torch.full((64,), float("inf"))})
    out = run("check", tmp_path / "model").out
    assert f"weights bad: {norm} holds NaN or infinity" in out
    assert "fix: download the file again; if it is the same, quantize or train again" in out


def test_a_fault_beside_another_one_is_told(llama: Path, tmp_path: Path) -> None:
    other = LoadVerdict(status=Status.MISREAD, why="another fault")
    amended = read(store(llama, tmp_path / "model", torch.full((2, 2), torch.nan)), other)
    assert amended.weights == other
    assert [f"{NAME} holds NaN" in each for each in amended.problems] == [True]


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
    told = [f"of {NAME} has the largest code" in each for each in found.suspicious]
    assert told == [True] * is_told


def make_int4() -> dict[str, torch.Tensor]:
    """Make integers of 4 bits in 2 groups of 32 columns; those of the last are all 0 (code 8)."""
    codes = torch.tensor([[[1, 7, 8, 15]], [[8, 8, 8, 8]]]).tile(1, 1, 8).tile(4, 1, 1)
    octets = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).reshape(4, -1)
    scale = torch.full((4, 2), 0.5, dtype=torch.bfloat16)
    return {f"{NAME}_packed": octets.view(torch.int32), f"{NAME}_scale": scale}


def make_fp4(group: int) -> dict[str, torch.Tensor]:
    """Make FP4 in 2 groups of a row; those of the last are zeros of both signs."""
    numbers = torch.tensor([[0x71, 0x20], [0x80, 0x08]], dtype=torch.uint8)
    codes = numbers.repeat_interleave(group // 4, dim=0).reshape(1, -1).repeat(4, 1)
    if group == 32:
        scale = torch.full((4, 2), 120, dtype=torch.uint8)
        return {f"{NAME}_packed": codes, f"{NAME}_scale": scale}
    scale = torch.full((4, 2), 0.5).to(torch.float8_e4m3fn)
    numbers = torch.full((1,), 0.25)
    return {f"{NAME}_packed": codes, f"{NAME}_scale": scale, f"{NAME}_global_scale": numbers}


def make_int8() -> dict[str, torch.Tensor]:
    codes = torch.arange(-6, 6, dtype=torch.int8).reshape(2, 6).repeat(2, 1)
    return {NAME: codes, f"{NAME}_scale": torch.full((4, 1), 0.5)}


@pytest.mark.parametrize(
    ("tensors", "part", "place", "value", "told"),
    [
        (make_int4(), "scale", (1, 0), 0.0, "0 beside codes that are not zero at [1, 0]: 1 of"),
        (make_int4(), "scale", (1, 0), 1e-39, "a number under 1.175e-38 beside codes that"),
        (make_int4(), "scale", (1, 1), 0.0, ""),
        (make_int4(), "scale", (1, 0), -0.5, ""),
        (make_int4(), "scale", ..., 0.0, "not zero at [0, 0]: 4 of its 8 scales"),
        (make_int8(), "scale", (2, 0), 0.0, "0 beside codes that are not zero at [2, 0]"),
        (make_fp4(16), "scale", (3, 0), 0.0, "0 beside codes that are not zero at [3, 0]"),
        (make_fp4(16), "scale", (3, 1), 0.0, ""),
        (make_fp4(16), "global_scale", 0, 0.0, "_global_scale holds 0"),
        (make_fp4(16), "global_scale", 0, 1.0, ""),
        (make_fp4(32), "scale", (2, 1), 255, "NaN (an exponent of 255) at [2, 1]: 1 of its 8"),
        (make_fp4(32), "scale", (2, 1), 0, ""),
    ],
)
def test_scales_that_lose_integers_and_fp4_are_faults(
    llama: Path,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    part: str,
    place: object,
    value: float,
    told: str,
) -> None:
    tensors[f"{NAME}_{part}"][place] = value
    fault = find_fault(store_all(llama, tmp_path / "model", tensors))
    assert bool(fault) == bool(told)
    assert not told or (fault.startswith(f"{NAME}_{part}") and told in fault)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [12, 16])
def test_a_row_of_negative_zeros_is_one_of_zeros(
    llama: Path, tmp_path: Path, dtype: torch.dtype, columns: int
) -> None:
    tensor = torch.ones(4, columns + (dtype is torch.bfloat16)).to(dtype)
    tensor[1] = torch.tensor(-0.0).to(dtype)
    tensor[2, 1:] = torch.tensor(-0.0).to(dtype)
    tensor[2, 0] = -1
    found = read(store(llama, tmp_path / "model", tensor))
    assert found.problems == (f"{NAME}: 1 of its rows are zeros",)


@pytest.mark.parametrize("shape", [(), (1,), (70, 1), (3, 4)])
@pytest.mark.parametrize(
    ("factors", "is_told"),
    [
        ({}, False),
        ({"v": 20}, False),
        ({"v": 50}, True),
        ({"v": 1 / 50}, True),
        ({"v": 50, "o": 1 / 50}, False),
    ],
)
def test_a_matrix_far_from_those_of_the_other_layers_is_told(
    llama: Path,
    tmp_path: Path,
    shape: tuple[int, ...],
    factors: dict[str, float],
    is_told: bool,
) -> None:
    torch.manual_seed(0)
    tensors = {}
    for layer in range(5):
        for role in ("v", "o"):
            name = f"model.layers.{layer}.self_attn.{role}_proj.weight"
            factor = factors.get(role, 1) if layer == 2 else 1
            tensors[name] = (torch.randn(70, 100) * 90).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.full(shape, 0.01 * factor)
    found = read(store_all(llama, tmp_path / "model", tensors)).suspicious
    text = "the values of model.layers.2.self_attn.v_proj.weight are "
    assert [each.startswith(text) for each in found] == [True] * is_told
    first = {name: each for name, each in tensors.items() if int(name.split(".")[2]) < 3}
    assert read(store_all(llama, tmp_path / "three layers", first)).suspicious == ()
