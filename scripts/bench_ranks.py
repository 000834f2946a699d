"""Time a calibration shared by two processes against one process, a core for each.

Started by scripts/bench --ranks. Every process has one thread; the figure is the tokens a second of
the report, which leaves out starting Python and planning, but neither loading nor the reduction.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench_run import PYTHON, Figure, compare, read_json, save_figures, script, show

WORK = Path("build/bench-ranks")
STATS = "stats.safetensors"


def main() -> None:
    """Measure, and print the figure."""
    arguments = parse_arguments()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    print(f"load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    figures = show([measure(arguments)])
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    if arguments.json:
        save_figures(arguments.json, figures)
    shutil.rmtree(WORK)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; scripts/bench itself adds the first two options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --ranks", description=__doc__.split(".", maxsplit=1)[0]
    )
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--samples", type=int, default=32, help="sequences (default 32)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each (default 512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Figure:
    """Run both in turn; the statistics have to be the same file."""
    tokens = WORK / "tokens.jsonl"
    size = [str(arguments.samples), str(arguments.seq_len)]
    read_json([PYTHON, script("bench_tokens.py"), arguments.model, str(tokens), *size])
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for number in range(arguments.rounds):
        for ranks in (1, 2) if number % 2 else (2, 1):
            speeds[ranks].append(run(ranks, arguments, tokens))
        if not filecmp.cmp(WORK / "1" / STATS, WORK / "2" / STATS, shallow=False):
            sys.exit("one process and two gave different statistics")
    name = "tokens/s, one process / two"
    return compare(arguments.dtype, name, speeds[1], speeds[2], 1 / 1.8)


def run(ranks: int, arguments: argparse.Namespace, tokens: Path) -> float:
    """Calibrate with so many processes: tokens a second."""
    out = WORK / str(ranks)
    shutil.rmtree(out, ignore_errors=True)
    start = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    size = ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len)]
    what = ["--data", str(tokens), *size, "--dtype", arguments.dtype, "--device", "cpu"]
    where = ["--out", str(out), "--format", "kv-scales"]
    command = [*start, "-m", "fp8calib", "calibrate", arguments.model, *what, *where]
    done = subprocess.run(  # noqa: S603
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stderr}\nfailed: {' '.join(command)}")
    report = json.loads((out / "report.json").read_text())
    return float(report["tokens_per_s"])


if __name__ == "__main__":
    main()
