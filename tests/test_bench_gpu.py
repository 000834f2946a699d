"""`scripts/bench --gpu` on the CPU, with a tiny model: its own logic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.benchmarks import gpu
from tests.kit.minutes import takes_minutes

ROOT = Path(__file__).parents[1]
SHAPE = "tiny=2,64,96,4,2,128"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it in the clone, with a work folder of its own."""
    given = ("--model", "", "--peers-python", "missing/python", "--device", "cpu")
    size = ("--samples", "2", "--seq-len", "16", "--rounds", "1", "--shapes", SHAPE)
    code = (
        "import sys; from pathlib import Path; from scripts.benchmarks import gpu; "
        f"gpu.WORK = Path({str(folder / 'work')!r}); gpu.TOKENS = gpu.WORK / 'tokens.jsonl'; "
        "gpu.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *given, *size, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@takes_minutes
def test_every_row_is_measured_or_says_why_not(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    for name in ("llm-compressor", "ModelOpt"):
        assert f"{name} does not start: No such file or directory" in done.stdout
    assert "tiny: measure_streamed: needs a GPU" in done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())["figures"]["tiny"]
    measured = {row for row, figure in found.items() if isinstance(figure, float)}
    assert measured == {gpu.CALIBRATION, gpu.COMMAND, *(row for row, _ in gpu.VERIFY.values())}
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table] == ["figure", *gpu.TARGETS]
    assert table[-1] == f"| {gpu.STREAMED} | open | 1.5 |"
