"""Faults planted in a server, each told from the others by its own sentence."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.model.geometry import Role, Site
from fp8calib.plugins.server import server as compare_with_server
from tests.cli.program import succeed
from tests.kit.minutes import in_minutes
from tests.plugins.server import planted
from tests.plugins.server.fake import FakeServer
from tests.plugins.server.planted import write_ids

Values = dict[Site, float]
SEQUENCES = 10
LENGTH = 64
OPTIONS = ("--seq-len", LENGTH, "--dtype", "float32")
ENGINE = ("--engine", planted.ENGINE)
BATCHES = ("--batch-size", 5)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The model, text that it was not calibrated on, and its scales."""

    model: Path
    data: Path
    scales: Path
    values: Values


def calibrate(model: Path, folder: Path) -> tuple[Path, Values]:
    """Calibrate a model; give its file of scales and what it holds."""
    data = write_ids(folder.with_suffix(".jsonl"), 8, LENGTH, seed=1)
    succeed("calibrate", model, "--data", data, *OPTIONS, "--format", "kv-scales", "--out", folder)
    path = folder / "kv_scales.safetensors"
    return path, {_site(name): float(value.max()) for name, value in load_file(path).items()}


def _site(name: str) -> Site:
    module, _, role = name.removesuffix("_scale").rpartition(".")
    return Site(module, Role(role))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("planted")
    scales, values = calibrate(model, folder / "out")
    data = write_ids(folder / "held-out.jsonl", SEQUENCES, LENGTH, seed=2)
    return Planted(model=model, data=data, scales=scales, values=values)


@pytest.fixture(scope="module")
def ask(served: Planted) -> Callable[..., Any]:
    """Give a function that verifies against a server, and returns the report."""

    def asked(predict: planted.Predict, *options: object) -> Any:
        with FakeServer(predict) as server:
            found = succeed(
                "server", server.url, served.model, "--data", served.data, *OPTIONS, *ENGINE,
                *BATCHES, "--json", *options,
            )  # fmt: skip
        return found.json

    return asked


def change(values: Values, layer: int, factor: float | None) -> Values:
    """Multiply the scales of k and v of one layer; None: 1.0."""
    return {
        site: (1.0 if factor is None else value * factor)
        if f".{layer}." in site.module and site.role in {Role.K, Role.V}
        else value
        for site, value in values.items()
    }


SITES = [
    Site(f"model.layers.{layer}.self_attn", role)
    for layer in range(planted.LAYERS)
    for role in (Role.K, Role.V)
]


def mix(values: Values, order: Callable[[list[float]], list[float]]) -> Values:
    """Give the sites other scales, from those of k and v of layer 0, then of layer 1."""
    return dict(zip(SITES, order([values[site] for site in SITES]), strict=True))


BEHAVES = "The server behaves like "
SERVED: dict[str, tuple[Callable[[Values], Values | None], str]] = {
    "the right ones": (lambda v: v, "The server is explained by {} (correlation 1.00)."),
    "none": (
        lambda _: None,
        f"{BEHAVES}scale-1.0 (correlation 1.00): your k/v scales are not in use.",
    ),
    "one layer's are too small": (
        lambda v: change(v, 2, 1 / 8),
        f"{BEHAVES}...: values of layer 2 clip, as its scales are too small.",
    ),
    "one layer is at 1.0": (
        lambda v: change(v, planted.NEEDS_SCALES, None),
        f"{BEHAVES}...: the k/v scales of layer 1 are not in use.",
    ),
    **{
        f"{role} is at 1.0": (
            lambda v, role=role: {s: 1.0 if s.role is role else each for s, each in v.items()},
            f"{BEHAVES}{{}} without its {role} scales (correlation 1.00): {role} is quantized at "
            "scale 1.0 in all layers.",
        )
        for role in (Role.K, Role.V)
    },
    "k and v are swapped": (
        lambda v: mix(v, lambda each: [each[i ^ 1] for i in range(len(each))]),
        f"{BEHAVES}{{}} with k and v scales swapped...: k is quantized with the scales of v, and v "
        "with those of k.",
    ),
    "reciprocals": (
        lambda v: mix(v, lambda each: [1 / value for value in each]),
        f"{BEHAVES}{{}} with reciprocals of its scales...: every k/v scale is 1 / scale.",
    ),
    "those of the next layer": (
        lambda v: mix(v, lambda each: [*each[2:], *each[-2:]]),
        f"{BEHAVES}{{}} with the scales of the next layer...: every layer has the k/v scales of "
        "the next one.",
    ),
    "those of the previous layer": (
        lambda v: mix(v, lambda each: [*each[:2], *each[:-2]]),
        f"{BEHAVES}{{}} with the scales of the previous layer...: every layer has the k/v scales "
        "of the previous one.",
    ),
}
"""From the scales of the model to those served, and what is said: {} is their file."""


LIKE_OTHERS = ("v is at 1.0", "one layer's are too small", "those of the next layer")


@pytest.mark.parametrize(
    "what", [*(each for each in SERVED if each not in LIKE_OTHERS), *in_minutes(*LIKE_OTHERS)]
)
def test_the_scales_that_a_server_has_are_told(
    served: Planted, runner: planted.Runner, ask: Callable[..., Any], what: str
) -> None:
    choose, says = SERVED[what]
    report = ask(runner.predict(runner.emulate(choose(served.values))), "--scales", served.scales)
    start, _, end = says.replace("{}", str(served.scales)).partition("...")
    assert report["advice"].startswith(start)
    assert report["advice"].endswith(end)
    assert "..." in says or report["advice"] == start
    name = report["server"]["explained_by"]
    assert name
    assert f" {name} (correlation " in report["advice"]


def test_the_scales_of_another_model(
    served: Planted,
    runner: planted.Runner,
    ask: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("another")
    planted.save_model(folder / "model", seed=3, large=2)
    _, values = calibrate(folder / "model", folder / "out")
    report = ask(runner.predict(runner.emulate(values)), "--scales", served.scales)
    assert report["advice"].startswith(f"The server differs from {served.scales} in layer")
    assert report["advice"].endswith(
        ", at least: it has other scales there, or it serves another checkpoint."
    )


@pytest.mark.parametrize("is_right", [True, False])
def test_the_cost_of_faults_is_bounded_and_said(
    served: Planted, runner: planted.Runner, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    """Right scales need none of them. There are 14 runs; a batch more than allowed may be used."""
    monkeypatch.setattr("fp8calib.plugins.server.faults._MOST_TIMES", 2)
    monkeypatch.setattr("fp8calib.plugins.server.faults._LEAST_TOKENS", 1)
    wrong = change(served.values, planted.NEEDS_SCALES, None)
    stages: dict[str, int] = {}
    with FakeServer(runner.predict(runner.emulate(served.values if is_right else wrong))) as server:
        compare_with_server(
            server.url, str(served.model), str(served.scales), str(served.data), seq_len=LENGTH,
            engine=planted.ENGINE, dtype="float32",
            progress=lambda stage, _done, total: stages.update({stage: total or 0}),
        )  # fmt: skip
    faults = {stage: total for stage, total in stages.items() if "faults" in stage}
    assert len(faults) == (0 if is_right else 2)
    text = SEQUENCES * LENGTH
    assert sum(faults.values()) <= 2 * text + 14 * LENGTH
    for stage, total in faults.items():
        assert stage.endswith(f", {total / text:.1f} times the text")


def test_another_checkpoint_behind_the_same_scales(
    served: Planted, ask: Callable[..., Any], tmp_path: Path
) -> None:
    """What is said of its scales must not be false."""
    for seed, size in enumerate((0.02, 0.5)):
        shutil.copytree(served.model, tmp_path / str(seed))
        path = tmp_path / str(seed) / "model.safetensors"
        generator = torch.Generator().manual_seed(seed)
        changed = {
            name: weight
            + torch.randn(weight.shape, generator=generator)
            * weight.std()
            * size
            * ("layers.0." in name and weight.ndim == 2)
            for name, weight in load_file(path).items()
        }
        save_file(changed, path, {"format": "pt"})
        other = planted.Runner(tmp_path / str(seed), torch.float32)
        report = ask(other.predict(other.emulate(served.values)), "--scales", served.scales)
        assert "does not use the scales" not in report["advice"]
        assert "behaves like" not in report["advice"]


def test_a_cache_that_is_not_fp8(
    served: Planted, plain: planted.Predict, ask: Callable[..., Any]
) -> None:
    report = ask(plain, "--scales", served.scales)
    assert report["advice"].startswith(
        "The server behaves like the unquantized model: its KV cache is not FP8 (its changes are "
    )
