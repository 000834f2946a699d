"""Time a calibration shared by two processes against one process, one core each.

Started by `scripts/bench --ranks`. Every process has one thread. The figure compares the tokens per
second of the reports, which exclude starting Python and planning, and include loading and reducing.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.child_process import PYTHON, call, run_arguments, write_tokens
from scripts.benchmarks.figures import Figure, compare, report, work_folder
from scripts.benchmarks.options import make_parser

WORK = Path("build/bench-ranks")
TOKENS = WORK / "tokens.jsonl"
STATS = "stats.safetensors"


def main() -> None:
    """Measure, and print the figure."""
    parser = make_parser("--ranks", __doc__, rounds=3, samples=32, dtypes=("float32", "bfloat16"))
    options = parser.parse_args()
    with work_folder(WORK):
        report(measure_speeds(options), options.json)


def measure_speeds(options: Namespace) -> Iterator[Figure]:
    """Run both in turn; exit if their statistics are not the same file."""
    write_tokens(options, TOKENS)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for number in range(options.rounds):
        for ranks in (1, 2) if number % 2 else (2, 1):
            speeds[ranks].append(run(ranks, options))
        if not filecmp.cmp(WORK / "1" / STATS, WORK / "2" / STATS, shallow=False):
            sys.exit("one process and two processes gave different statistics")
    yield compare(options.dtype, "tokens/s, one process / two", speeds[1], speeds[2], 1 / 1.8)


def run(ranks: int, options: Namespace) -> float:
    """Calibrate with this number of processes; return the tokens per second."""
    out = WORK / str(ranks)
    shutil.rmtree(out, ignore_errors=True)
    call(
        *(PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "-m", "fp8calib"),
        *("calibrate", options.model, *run_arguments(options, TOKENS, options.dtype)),
        *("--device", "cpu", "--out", out, "--format", "kv-scales"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(json.loads((out / "report.json").read_text())["tokens_per_s"])


if __name__ == "__main__":
    main()
