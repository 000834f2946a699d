"""Statistics on disk: the same bytes for the same values, and nothing damaged is believed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8calib.calibration.calibration_stats import (
    CalibrationStats,
    SiteStats,
    load_stats_file,
    save_stats,
)
from fp8calib.calibration.stats_header import Skipped, StatsHeader
from fp8calib.data.modality import Modality
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.geometry import Role, Site
from tests.formats.handmade import make_attention, make_geometry

K = Site("model.layers.0.self_attn", Role.K)
UP = Site("model.layers.0.mlp.experts.up_proj", Role.INPUT)
WEIGHT = Site("model.layers.0.mlp.experts.up_proj", Role.WEIGHT)


def make_stats() -> CalibrationStats:
    """Give one site of each kind, every field in use, two tensors equal."""
    header = StatsHeader(
        geometry=make_geometry([make_attention(0)]),
        model_fingerprint="aa",
        data_fingerprint="bb",
        data_sources=("calib.jsonl",),
        num_sequences=2,
        num_tokens=8,
        recipe_name="kv",
        recipe_hash="cc",
        compute_dtype="float32",
        histogram_sequences=8,
        input_histogram_tokens=4,
        skipped=(Skipped(site="lm_head", why="not run"),),
        versions={"torch": "2"},
        modality_tokens={Modality.TEXT: 7, Modality.IMAGE: 1},
    )
    sites = {
        WEIGHT: SiteStats(
            count=0,
            amax=torch.tensor([1.0, 2.0]),
            amax_in=torch.tensor([0.5, 0.25, 0.0]),
            experts=torch.tensor([[1.0], [2.0]]),
        ),
        K: SiteStats(
            count=8,
            amax=torch.tensor([1.0, 2.0]),
            progress=torch.tensor([1.0, 1.0, 2.0, 2.0]),
            histogram=torch.tensor([0, 3, 5]),
        ),
        UP: SiteStats(
            count=8, amax=torch.tensor([4.0, 3.0, 2.0]), expert_counts=torch.tensor([8, 0])
        ),
    }
    return CalibrationStats(header=header, sites=sites)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "stats.safetensors"
    save_stats(make_stats(), found)
    return found


def damage(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
    """Change tensors and JSON header of a stats file, well-formed as safetensors."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fp8calib"])
    change(tensors, header)
    save_file(tensors, path, metadata={"fp8calib": json.dumps(header)})


PROGRESS, HISTOGRAM = f"{K}/progress", f"{K}/histogram"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_that_are_no_magnitudes_are_refused(path: Path, value: float) -> None:
    damage(path, lambda tensors, _: tensors[PROGRESS].__setitem__(1, value))
    with pytest.raises(ModelError, match="progress holds values that are not magnitudes"):
        load_stats_file(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, _: t.update({PROGRESS: torch.ones(4, dtype=torch.int64)}), "not magnitudes"),
        (
            lambda t, _: t[HISTOGRAM].__setitem__(0, -1),
            "histogram holds values that are not counts",
        ),
        (lambda t, _: t.update({f"{K}/positions": torch.ones(5)}), "positions .* too few or many"),
        (lambda _, h: h["header"]["modality_tokens"].update(smell=1), "header.modality_tokens"),
        (lambda t, _: t.pop(f"{UP}/amax"), "amax' is missing"),
        (lambda t, _: t.update({f"{K}/nonsense": torch.ones(1)}), "unknown tensor"),
        (lambda _, h: h["header"].update(schema_version=3), "header.schema_version"),
        (lambda _, h: h["header"].pop("geometry"), "header.geometry"),
        (lambda _, h: h["header"].update(surprise=1), "header.surprise"),
        (lambda _, h: h["counts"].update({str(K): -1}), "counts"),
        (lambda _, h: h["counts"].update({"model.layers.0.nonsense": 1}), "missing|valid Role"),
        (lambda _, h: h.update(aliases={f"{K}/amax": "nowhere"}), "'nowhere' is missing"),
    ],
)
def test_a_damaged_file_is_refused(path: Path, change: Callable[..., object], told: str) -> None:
    damage(path, change)
    with pytest.raises(ModelError, match=told) as caught:
        load_stats_file(path)
    assert caught.value.message.startswith(f"{path} is damaged")
    assert "calibrate" in caught.value.hint


def test_other_files_and_none_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(1)}, other)
    with pytest.raises(ModelError, match="is not a stats file of this tool"):
        load_stats_file(other)
    other.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        load_stats_file(other)
    with pytest.raises(UsageError, match="no stats file at"):
        load_stats_file(tmp_path / "none.safetensors")
