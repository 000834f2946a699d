"""Scales that do not belong among those of the other layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

import fp8calib
from fp8calib.cli import main
from fp8calib.engines.scale_mistakes import find_outliers
from tests import zoo
from tests.engines.test_odd_scales import write_overlay
from tests.kit.checkpoints import change_tensors

# The largest K of the layers of a model whose first layers differ, and V that grows with depth.
K = [350.0, 60.0, 16.0, 12.0, 14.0, 18.0, 21.0, 17.0, 13.0, 15.0, 26.0, 110.0]
V = [0.2, 0.4, 1.1, 1.5, 2.0, 2.8, 4.1, 6.5, 9.0, 14.0, 22.0, 31.0]


def run(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    return int(raised.value.code or 0)


def change(
    amax: Sequence[float], changes: Mapping[int, Callable[[float], float]]
) -> dict[int, float]:
    """Give the scales of layers; some are changed."""
    scales = {layer: each / 448 for layer, each in enumerate(amax)}
    return scales | {layer: edit(scales[layer]) for layer, edit in changes.items()}


@pytest.mark.parametrize("amax", [K, V, K[:3], V[:2], K[2:3], [], [0.05, 7.0], [1.0, 90.0, 9000.0]])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_right_scales_are_no_outliers(amax: Sequence[float], factor: float) -> None:
    assert not find_outliers(change([each * factor for each in amax], {}))


@pytest.mark.parametrize("amax", [K, V])
@pytest.mark.parametrize("layer", [4, 7, 8])
@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda scale: scale * 1000, "times larger than the median of the other layers"),
        (lambda scale: scale / 1000, "times smaller than the median of the other layers"),
        (lambda scale: scale * 448, "it looks like amax, not amax / 448"),
        (lambda scale: scale * 9000, "times larger"),
    ],
)
def test_one_layer_is_found(
    amax: Sequence[float], layer: int, edit: Callable[[float], float], text: str
) -> None:
    found = find_outliers(change(amax, {layer: edit}))

    assert list(found) == [layer]
    assert text in found[layer]


@pytest.mark.parametrize("layer", range(12))
def test_a_reciprocal_in_one_layer_is_named(layer: int) -> None:
    found = find_outliers(change([4.0 + each / 8 for each in range(12)], {layer: lambda x: 1 / x}))

    assert list(found) == [layer]
    assert "it looks like a reciprocal: 448 / amax, not amax / 448" in found[layer]


def test_a_fault_of_half_of_the_layers_is_found() -> None:
    amax = [2.0] * 4 + [3.0] * 4

    found = find_outliers(change(amax, {layer: lambda x: 1 / x for layer in range(4)}))

    assert set(found) in ({0, 1, 2, 3}, {4, 5, 6, 7})


def test_scales_of_one_are_not_compared() -> None:
    scales = change([1.0, 1.1, 1.2, 0.9], {})

    assert not find_outliers({**scales, 4: 1.0, 5: 1.0})
    assert find_outliers({**scales, 4: 1.01, 5: 1.01})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose K no weights limit: a norm follows."""
    folder = tmp_path_factory.mktemp("outliers") / "qwen3"
    zoo.save("qwen3", folder, num_hidden_layers=8)
    return folder


def test_an_outlier_fails_unless_allowed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = {(layer, role): 0.003 for layer in range(8) for role in "kv"}
    folder = write_overlay(model, tmp_path / "o", {**scales, (5, "k"): 3.0})

    report = fp8calib.check(folder, engine="vllm")
    assert not report.ok
    [suspicion] = report.engines["vllm"].suspicious
    assert suspicion.startswith("the k scale of layer 5 (3) is 1,000 times larger than the median")
    assert fp8calib.check(folder, engine="vllm", allow_suspicious=True).ok
    assert fp8calib.check(write_overlay(model, tmp_path / "r", scales), engine="vllm").ok

    arguments = ["check", str(folder), "--engine", "vllm", "--json"]
    assert run(arguments) == 8
    assert json.loads(capsys.readouterr().out)["engines"]["vllm"]["suspicious"] == [suspicion]
    assert run([*arguments, "--allow-suspicious"]) == 0


def test_weights_of_an_outlier_are_read_wherever_it_is(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model", num_hidden_layers=30)
    scales = {(layer, role): 0.0005 for layer in range(30) for role in "kv"}
    folder = write_overlay(tmp_path / "model", tmp_path / "o", {**scales, (6, "v"): 3.0})

    report = fp8calib.check(folder, engine="vllm", read_weights=True)
    [suspicion] = report.engines["vllm"].suspicious

    assert suspicion.startswith("the v scale of layer 6 stands for values of up to 1,344, but v ")


def test_weights_excuse_a_layer_that_differs(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model", num_hidden_layers=30)
    scales = {(layer, role): 0.0005 for layer in range(30) for role in "kv"}
    folder = write_overlay(tmp_path / "model", tmp_path / "o", {**scales, (6, "v"): 0.5})
    name = "model.layers.6.self_attn.v_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]

    assert not fp8calib.check(folder, engine="vllm").ok
    assert fp8calib.check(change_tensors(folder, {name: weight * 1000}), engine="vllm").ok


def test_invalid_scales_have_a_row_of_their_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = {(layer, role): 0.003 for layer in range(8) for role in "kv"}
    odd = {(0, "k"): 0.0, (1, "k"): float("nan"), (2, "k"): float("inf"), (3, "k"): float("nan")}
    folder = write_overlay(model, tmp_path / "o", scales | odd)

    assert run(["check", str(folder), "--engine", "vllm"]) == 8

    shown = " ".join(capsys.readouterr().out.split())
    for text in ("0 is not a scale", "nan is not a scale", "inf is not a scale"):
        assert text in shown
