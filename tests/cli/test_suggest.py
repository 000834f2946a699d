"""The command after a verification, for a model on the Hub with code of its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.commands.suggest import suggest_command
from fp8calib.commands.verify import VerifyRequest
from fp8calib.verification.report import Remedy
from tests.cli.program import run
from tests.formats.handmade import make_geometry, make_stats


def test_a_query_scale_is_exported_onto_the_revision_that_was_verified(tmp_path: Path) -> None:
    save_stats(make_stats(make_geometry([]), {}), tmp_path / "stats.safetensors")
    request = VerifyRequest("org/model", revision="v2", trust_remote_code=True)
    decision = SimpleNamespace(remedy=Remedy.SCALE_QUERY, candidate=str(tmp_path))
    report: Any = SimpleNamespace(model="org/model", decision=decision)
    printed = suggest_command(report, request, {})
    assert "--model org/model --revision v2" in printed
    refused = run(*shlex.split(printed)[1:])
    assert "no such option" not in refused.err.lower()
    assert refused.code != 0  # there is no such model
