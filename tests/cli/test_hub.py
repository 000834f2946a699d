"""Downloads by huggingface_hub with a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import succeed
from tests.docs.pages import ROOT
from tests.kit.hub import FakeHub, serve_hub
from tests.kit.minutes import takes_minutes


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub() as found:
        yield found


def spawn(
    hub: FakeHub, tmp_path: Path, *command: object, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a program whose huggingface_hub knows only this Hub, with its own home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=tmp_path,
        env=environment | changes,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "fp8"
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", folder)
    return folder


@takes_minutes
def test_a_download_continues_where_it_was_interrupted(
    hub: FakeHub, checkpoint: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    hub.repos["org/tiny"] = files
    hub.breaks = "model.safetensors"
    check = ("-m", "fp8calib", "check", "org/tiny", "--engine", "vllm", "--read-weights")
    done = spawn(hub, tmp_path, *check)
    assert done.returncode == 0, done.stderr
    assert hub.breaks == ""  # it did break
    assert "org/tiny: ok" in done.stdout
    (tmp_path / "hf").rename(tmp_path / "whole")
    # killed after some files: only the others are fetched
    spawn(hub, tmp_path, *check)
    blobs = [path for path in (tmp_path / "hf").rglob("model.safetensors") if path.exists()]
    for blob in {path.resolve() for path in blobs}:
        blob.unlink()
    hub.asked.clear()
    assert spawn(hub, tmp_path, *check).returncode == 0
    fetched = [each.rpartition("/")[2] for each in hub.asked if each.startswith("GET /org/")]
    assert fetched == ["model.safetensors"]
