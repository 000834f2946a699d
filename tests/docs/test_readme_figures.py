"""The figures in the README: those that its own commands print, within the errors it prints."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import succeed
from tests.docs.pages import ROOT

MODEL = ROOT / "demo" / "SmolLM2-135M-Instruct"
KLD = re.compile(r"FP8 itself costs KLD ([\d.]+) ± ([\d.]+) \(ratio ([\d.]+) ± ([\d.]+)")


@pytest.mark.skipif(not MODEL.is_dir(), reason="no demo model: scripts/fetch-demo-model")
def test_the_first_command_prints_the_figures_of_the_readme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three standard errors of the difference: the text may be that of another Python."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (expected,) = KLD.findall(readme)
    command = re.search(r"fp8calib (verify demo/\S+ --samples 8 --seq-len 512 --dtype \w+)", readme)
    assert command is not None
    monkeypatch.chdir(Path(ROOT))
    (found,) = set(KLD.findall(succeed(*shlex.split(command[1])).out))
    for index in (0, 2):
        (told, told_se), (mine, mine_se) = (
            map(float, pair[index : index + 2]) for pair in (expected, found)
        )
        assert abs(told - mine) <= 3 * math.hypot(told_se, mine_se)
