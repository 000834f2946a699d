"""Fixtures of the checkpoint tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.handmade import GOLDEN_FILE


@pytest.fixture
def golden_path(tmp_path: Path) -> Path:
    """Write the golden file."""
    path = tmp_path / "golden.safetensors"
    path.write_bytes(GOLDEN_FILE)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte, if the machine allows it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
