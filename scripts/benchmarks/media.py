"""Measure calibration on rows with images against the model's own forward pass on them.

Started by `scripts/bench --media`. The model is a random LLaVA: 12 layers of 576 channels unless
others are asked for, a tower of 6 layers, 256 tokens an image.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.child_process import PROGRAM, Usage, measure, read_json, worker
from scripts.benchmarks.figures import Figure, compare, report, take_turns, work_folder
from scripts.benchmarks.options import make_parser

WORK = Path("build/bench-media")
MODEL = WORK / "model"
ROWS = WORK / "images" / "rows.jsonl"
OUT = WORK / "out"


def main() -> None:
    """Measure, and print the figures."""
    parser = make_parser("--media", __doc__, rounds=5, dtypes=("both", "float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=16, help="rows with an image each (16)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (12)")
    parser.add_argument("--channels", type=int, default=576, help="a multiple of 192 (576)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    options = parser.parse_args()
    with work_folder(WORK):
        shape = (options.rows, options.layers, options.channels)
        machine = read_json(*worker("workers.media_rows", options.model, WORK, *shape))
        options.device = "cuda:0" if machine["gpu"] and options.device == "auto" else "cpu"
        dtypes = ["float32", "bfloat16"] if options.dtype == "both" else [options.dtype]
        figures = (each for dtype in dtypes for each in measure_all(options, dtype))
        about = {"rows": options.rows, "rounds": options.rounds, "machine": machine}
        report(figures, options.json, {**about, "cores": os.cpu_count()})


def measure_all(options: Namespace, dtype: str) -> Iterator[Figure]:
    """Time passes in one process, then whole commands in turn."""
    arguments = (MODEL, ROWS, options.rows, dtype, options.device, options.rounds)
    seconds = read_json(*worker("workers.media_pass", *arguments))
    for upper, lower, title, target in (
        ("calibrate", "plain", "pass / model(**inputs)", 1.25),
        ("calibrate", "body", "pass / model without its head", None),
        ("processing, calibrate", "processing, plain", "the same, with the processor", 1.25),
        ("planning, calibrate", "processing, plain", "plan and pass / the same", None),
    ):
        yield compare(dtype, title, seconds[upper], seconds[lower], target)
    usages = run_commands(options, dtype)
    ours, plain = usages["ours"], usages["plain"]
    yield compare(dtype, "command / bare script", ours, plain, 1.25, "duration_s")
    title = "command / bare script, processor time"
    yield compare(dtype, title, ours, plain, 1.25, "cpu_s")
    yield compare(dtype, "peak memory / bare script", ours, plain, 1.15, "peak_resident_mb")


def run_commands(options: Namespace, dtype: str) -> dict[str, list[Usage]]:
    """Run the command and the bare script in turn."""
    data = ["--data", str(ROWS), "--samples", str(options.rows), "--dtype", dtype]
    where = ["--device", options.device, "--out", str(OUT)]
    commands = {
        "ours": [PROGRAM, "calibrate", str(MODEL), *data, *where],
        "plain": worker("workers.media_forward", MODEL, ROWS, dtype, options.device),
    }
    usages: dict[str, list[Usage]] = {name: [] for name in commands}
    for name in take_turns(commands, options.rounds):
        usages[name].append(measure(commands[name], WORK / "log"))
        shutil.rmtree(OUT, ignore_errors=True)
    return usages


if __name__ == "__main__":
    main()
