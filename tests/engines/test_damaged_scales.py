"""Damages to the scales of many layers, with the statistics of the model and without."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import fp8calib
from fp8calib.engines.replay.verdicts import EngineReport
from tests import zoo
from tests.engines.test_odd_scales import SCHEME, change, measure, rows, write_overlay
from tests.kit.checkpoints import change_quantization, change_tensors

__all__ = ["rows"]
NUM_LAYERS = 18
SIZES = {
    "k": [1, 3, 5, 4, 7, 5, 4, 6, 3, 5, 4, 9, 5, 4, 6, 4, 3, 5],
    "v": [0.1, 0.2, 0.5, 0.4, 0.7, 0.8, 1.0, 1.3, 1.1, 1.4, 1.8, 1.5, 2.1, 2.0, 3.1, 2.6, 3.3, 4.7],
}
Slot = tuple[int, str]
Scales = Mapping[Slot, float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a llama whose K and V differ from layer to layer."""
    folder = tmp_path_factory.mktemp("damaged") / "llama"
    zoo.save("llama", folder, num_hidden_layers=NUM_LAYERS)

    def resize(name: str, x: torch.Tensor) -> torch.Tensor:
        found = re.search(r"layers\.(\d+)\.self_attn\.([kv])_proj", name)
        return x if found is None else x * SIZES[found[2]][int(found[1])]

    change(folder, resize)
    return folder


@pytest.fixture(scope="module")
def stats(model: Path, rows: Path) -> fp8calib.CalibrationStats:
    return measure(model, rows)


@pytest.fixture(scope="module")
def amax(stats: fp8calib.CalibrationStats) -> Scales:
    return {
        (layer.index, str(site.role)): stats.sites[site].amax.max().item()
        for layer, attention in stats.geometry.attentions()
        for site in stats.sites
        if site.module == attention.module and str(site.role) in "kv"
    }


def check(folder: Path, stats: fp8calib.CalibrationStats | None = None) -> EngineReport:
    return fp8calib.check(folder, engine="vllm", stats=stats, read_weights=True).engines["vllm"]


def list_misread(report: EngineReport) -> Mapping[Slot, str]:
    return {
        (layer.layer, role): verdict.why
        for layer in report.layers
        for role, verdict in (("k", layer.k), ("v", layer.v))
        if verdict.status == "bad"
    }


def test_a_scale_that_clips_is_bad_by_what_it_clips(
    model: Path, stats: fp8calib.CalibrationStats, amax: Scales, tmp_path: Path
) -> None:
    right = {each: x / 448 for each, x in amax.items()}
    folder = write_overlay(model, tmp_path / "o", right | {(3, "k"): right[3, "k"] / 4})

    [text] = list_misread(check(folder, stats)).values()

    share = re.search(r"and (\d+)\.\d% of the values clip, as its histogram estimates", text)
    assert share is not None
    # A normal distribution with its largest of 1536 values at 3.3 deviations: P(|x| > 0.83).
    assert 25 < int(share[1]) < 55


def swap(amax: Scales) -> Scales:
    return {(layer, role): amax[layer, "v" if role == "k" else "k"] for layer, role in amax}


def shift(amax: Scales, by: int) -> Scales:
    return {
        (layer, role): amax[min(max(layer + by, 0), NUM_LAYERS - 1), role] for layer, role in amax
    }


MIXUPS: Mapping[str, Callable[[Scales], Scales]] = {
    "the k and v scales are swapped": swap,
    "each layer has the scales of the next one": lambda amax: shift(amax, 1),
    "each layer has the scales of the previous one": lambda amax: shift(amax, -1),
}


@pytest.mark.parametrize("text", MIXUPS)
@pytest.mark.parametrize("headroom", [1.0, 1.5])
def test_scales_of_other_places_are_bad(
    model: Path,
    stats: fp8calib.CalibrationStats,
    amax: Scales,
    tmp_path: Path,
    text: str,
    headroom: float,
) -> None:
    scales = {slot: headroom * x / 448 for slot, x in MIXUPS[text](amax).items()}
    folder = write_overlay(model, tmp_path / "o", scales)

    found = list_misread(check(folder, stats))

    assert sum(each.startswith(text) for each in found.values()) >= 2 * (NUM_LAYERS - 1)
    told = [each for each in check(folder).suspicious if "are swapped" in each]
    assert bool(told) == (MIXUPS[text] is swap)


@pytest.fixture(scope="module")
def quantized(
    model: Path,
    stats: fp8calib.CalibrationStats,
    amax: Scales,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Save FP8 weights with input scales and KV scales."""
    folder = tmp_path_factory.mktemp("quantized") / "q"
    fp8calib.quantize(model, "fp8-static", folder, stats=stats)
    kv = {
        f"model.layers.{layer}.self_attn.{role}_scale": torch.tensor([x / 448])
        for (layer, role), x in amax.items()
    }
    return change_quantization(change_tensors(folder, kv), kv_cache_scheme=SCHEME)


@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale"])
def test_reciprocal_scales_of_linears_are_not_blamed_on_k(
    quantized: Path, tmp_path: Path, suffix: str
) -> None:
    folder = Path(shutil.copytree(quantized, tmp_path / "q"))
    change(folder, lambda name, x: 1 / x if name.endswith(suffix) else x)

    [text] = check(folder).suspicious

    assert text.startswith(f"weights: their {suffix.removesuffix('_scale')} scales stand for ")
    assert text.endswith("they look like reciprocals; engines need amax / 448, not 448 / amax")
