"""Scales that do not belong among those of the other layers."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import fp8calib
from fp8calib.cli import main
from fp8calib.engines.odd_scales import find_outliers
from tests import zoo
from tests.engines.test_odd_scales import write_overlay

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
