"""`scripts/bench --gpu` on the CPU, with a tiny model: its own logic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import gpu
from tests import zoo
from tests.kit.minutes import takes_minutes

pytestmark = takes_minutes
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
    assert table[-2:] == [f"| {gpu.STREAMED} | open | 1.5 |", f"| {gpu.OFFLOADED} | open | 1.0 |"]


def test_a_model_that_cannot_be_made_leaves_its_rows_open(tmp_path: Path) -> None:
    done = run(tmp_path, "--shapes", "odd=2,64,96,3,2,128")
    assert done.returncode == 0, done.stderr
    assert "odd: does not run: " in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(gpu.TARGETS)
    assert all(" | open | " in row for row in rows)


@pytest.mark.parametrize("room", [2e-4, 1.0])
def test_accelerate_runs_the_model_with_weights_beyond_the_limit(
    room: float, tmp_path: Path
) -> None:
    """Of half of 200 kB the layers take the most; what fits is no comparison."""
    zoo.save("llama", tmp_path / "model", num_hidden_layers=8)
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("".join(json.dumps({"input_ids": [3, 5, 7 + n]}) + "\n" for n in range(2)))
    command = ("-m", "scripts.benchmarks.workers.offloaded_pass", tmp_path / "model", tokens)
    done = subprocess.run(
        [sys.executable, *map(str, command), "float32", "cpu", str(room)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if room == 1.0:
        assert done.returncode == 1
        assert done.stderr.endswith("the model fits into this memory\n")
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["offloaded"] > 0
