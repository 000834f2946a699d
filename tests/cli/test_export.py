"""`export` and `show`: from a stats file alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import ALL_FORMATS, QUICK
from tests.cli.program import Outcome, fail, snapshot, succeed

LOOSE = ("kv-scales", "vllm-json", "rfc")
"""Formats that need no model."""


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Export, require the exit code, and that the folder around the output did not change."""

    def export(code: int, stats: Path, *options: object) -> str:
        before = snapshot(tmp_path)
        text = fail(code, "export", stats, *options, "--out", tmp_path / "out")
        assert snapshot(tmp_path) == before
        return text

    return export


def test_an_export_equals_what_calibrate_wrote(
    calibrated: tuple[Path, Outcome], stats: Path, model: Path, tmp_path: Path
) -> None:
    """Each format for 1 and 2 ranks."""
    command = ("export", stats, "--format", *ALL_FORMATS, "--tp", 1, "--tp", 2, "--model", model)
    report = succeed(*command, "--out", tmp_path / "out", "--json").json
    direct, exported = snapshot(calibrated[0]), snapshot(tmp_path / "out")
    for own in ("stats.safetensors", "report.json"):
        del direct[own]
    assert direct == exported
    files = [path for path in exported if exported[path] != "folder"]
    assert report["files"] == sorted(files)
    assert report["out"] == str(tmp_path / "out")


def test_loose_formats_need_nothing_but_the_stats(stats: Path, tmp_path: Path) -> None:
    alone = shutil.copy(stats, tmp_path / "renamed.safetensors")
    command = ("export", alone, "--format", *LOOSE, "--tp", 1, "--tp", 2, "--tp", 4)
    report = succeed(*command, "--out", tmp_path / "out", "--json").json
    assert len(report["files"]) == 1 + 3 + 3
    factors = json.loads((tmp_path / "out" / "kv_cache_scales.tp4.json").read_text())
    per_rank = factors["kv_cache"]["scaling_factor"]
    # two KV heads on four ranks: ranks 0 and 1 hold the first, 2 and 3 the second
    assert per_rank["0"] == per_rank["1"]
    assert per_rank["2"] == per_rank["3"]
    assert per_rank["0"] != per_rank["2"]


def test_other_files_are_no_stats(refused: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "notes.safetensors"
    text.write_text("these are no statistics, but long enough for a header")
    refused(4, text, "--format", "kv-scales")
    other = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(3)}, other)
    found = refused(4, other, "--format", "kv-scales")
    assert "not a stats file" in found
    assert "`fp8calib extract-kv-scales " in found
    assert "pydantic" not in found
    assert "\n" not in found.rpartition("\n")[0]


# --- show --------------------------------------------------------------------------------------


def test_a_folder_with_an_overlay_in_it_is_refused_alike(
    model: Path, data: Path, stats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    succeed("export", stats, "--format", "kv-overlay", "--model", model, "--out", out)
    extract = ("--quantized-model", out, "--model", model, "--save-path", tmp_path / "new")
    for code, command in (
        (2, ("check", out)),
        (4, ("verify", model, "--data", data, *QUICK, "--scales", out)),
        (4, ("extract-kv-scales", *extract)),
    ):
        assert f"such as {out / 'kv-overlay'}" in fail(code, *command)
