"""The calibrated llama, its quantized children, and an export that has to be refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.graft.grafting import PLAIN
from tests.cli.program import fail, snapshot
from tests.cli.quantized_children import calibrate_base, save_child


@pytest.fixture(scope="package")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate the tiny llama: statistics and `kv_scales.safetensors`."""
    return calibrate_base(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture(scope="package")
def children(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("children")

    def save(form: str) -> Path:
        place = folder / form.replace(" ", "").replace(",", "-")
        return place if place.exists() else save_child(form, place)

    return save


@pytest.fixture
def child(children: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy a quantized checkpoint that a test may change."""
    return Path(shutil.copytree(children(PLAIN), tmp_path / "child"))


@pytest.fixture
def refused(calibrated: Path, tmp_path: Path) -> Callable[..., str]:
    """Export an overlay, require the exit code and that nothing was written or changed."""

    def export(code: int, model: object, *options: object, stats: Path | None = None) -> str:
        before = snapshot(tmp_path)
        source = stats or calibrated / "stats.safetensors"
        asked = () if "--format" in options else ("--format", "kv-overlay")
        command = ("export", source, *asked, "--model", model, "--out", tmp_path / "out")
        text = fail(code, *command, *options)
        assert snapshot(tmp_path) == before
        return text

    return export
