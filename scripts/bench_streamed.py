"""Time a streamed calibration against a whole one, and run a large model under a small cap.

Started by scripts/bench --streamed. The large model is made up: a random Llama of 3B parameters
that the kernel lets have 3 GB (a control group where systemd gives one, else RLIMIT_DATA). Imports
no torch: a child's memory, as the kernel counts it, begins at its parent's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_child import Watched, watch
from bench_run import PROGRAM, PYTHON, Figure, compare, read_json, save_figures, script, show

WORK = Path("build/bench-streamed")
GIB = 2**30
SHAPE_3B = (28, 3072, 8192, 24, 8, 128256)
"""Layers, width, width inside, heads, KV heads, words: 3.2 billion parameters, 6.4 GB."""
_SCOPE = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]


@dataclass(frozen=True, kw_only=True)
class Taken(Watched):
    """What one run of a child took, and what its report says."""

    run_s: float
    """By the report: without the start of the interpreter, and without the plan."""
    memory: Mapping[str, object]


def main() -> None:
    """Measure, and print a line a figure."""
    arguments = parse_arguments()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    print(f"load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    figures = show(measure_overhead(arguments)) if not arguments.large_alone else []
    if not arguments.small_alone:
        figures += show(measure_large(arguments))
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    if arguments.json:
        save_figures(arguments.json, figures)
    shutil.rmtree(WORK)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; scripts/bench itself adds the first two options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --streamed", description=__doc__.split(".")[0]
    )
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--samples", type=int, default=16, help="sequences (default 16)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each (default 512)")
    parser.add_argument("--small-alone", action="store_true", help="leave out the large model")
    parser.add_argument("--large-alone", action="store_true", help="the large model alone")
    parser.add_argument(
        "--shape",
        default=",".join(map(str, SHAPE_3B)),
        metavar="L,C,I,H,K,V",
        help="layers, width, width inside, heads, KV heads and words of the large model",
    )
    parser.add_argument(
        "--cap-gb", type=float, default=3.0, help="what the large model may have (default 3 GB)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    return parser.parse_args()


# --- a model that fits -------------------------------------------------------------------------


def measure_overhead(arguments: argparse.Namespace) -> list[Figure]:
    """Run the command whole and streamed in turn: all of it, and the pass that its report times."""
    tokens = WORK / "tokens.jsonl"
    size = [str(arguments.samples), str(arguments.seq_len)]
    read_json([PYTHON, script("bench_tokens.py"), arguments.model, str(tokens), *size])
    whole = calibrate_command(arguments.model, tokens, arguments, arguments.dtype)
    streamed = [*whole, "--memory", find_smallest_cap(whole)]
    taken: dict[str, list[Taken]] = {"whole": [], "streamed": []}
    run(whole)  # warms the page cache
    for number in range(arguments.rounds):
        for name in ("whole", "streamed") if number % 2 else ("streamed", "whole"):
            taken[name].append(run(whole if name == "whole" else streamed))
    if not all(each.memory["streamed"] for each in taken["streamed"]):
        sys.exit("the model was not streamed")
    durations = {name: [each.duration_s for each in runs] for name, runs in taken.items()}
    peaks = {name: [each.peak_bytes / 1e6 for each in runs] for name, runs in taken.items()}
    formula = [float(str(each.memory["peak_bytes"])) / 1e6 for each in taken["streamed"]]
    dtype = arguments.dtype
    return [
        compare(dtype, "streamed / whole", durations["streamed"], durations["whole"], 1.15),
        compare(dtype, "streamed: peak memory / whole", peaks["streamed"], peaks["whole"], None),
        compare(dtype, "streamed: peak memory / formula", peaks["streamed"], formula, 1.0),
    ]


def find_smallest_cap(command: Sequence[str]) -> str:
    """Ask with a cap that is too small: the error names the smallest one that works."""
    asked = subprocess.run(  # noqa: S603
        [*command, "--memory", "0.01"], capture_output=True, text=True, check=False
    )
    found = re.search(r"the smallest --memory that works is (\S+);", asked.stderr)
    if found is None:
        sys.exit(f"{asked.stderr}\nno smallest --memory was named")
    return found.group(1)


def calibrate_command(
    model: str, tokens: Path, arguments: argparse.Namespace, dtype: str
) -> list[str]:
    """Give the command line that is measured."""
    size = ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len)]
    out = ["--out", str(WORK / "out"), "--format", "kv-scales"]
    return [PROGRAM, "calibrate", model, "--data", str(tokens), *size, *out, "--dtype", dtype]


# --- a model that does not fit -----------------------------------------------------------------


def measure_large(arguments: argparse.Namespace) -> list[Figure]:
    """Calibrate a large random model under a cap that the kernel enforces."""
    folder, tokens = WORK / "large", WORK / "large.jsonl"
    shape = arguments.shape.split(",")
    built = read_json([PYTHON, script("bench_streamed_model.py"), str(folder), *shape])
    words = int(shape[-1])
    rows = [
        {"input_ids": [(7 * row + 11 * i) % words for i in range(arguments.seq_len)]}
        for row in range(arguments.samples)
    ]
    tokens.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cap_bytes = int(arguments.cap_gb * 1e9)
    command = calibrate_command(str(folder), tokens, arguments, "bfloat16")
    cap = open_cap(cap_bytes)
    taken = run([*cap.prefix, *command, "--memory", f"{cap_bytes / GIB:.4f}"], cap=cap.hold)
    if not taken.memory["streamed"]:
        sys.exit("the model was not streamed")
    formula = float(str(taken.memory["peak_bytes"]))
    print(
        f"{built['parameters'] / 1e9:.2f} billion parameters ({built['size_bytes'] / 1e9:.2f} GB) "
        f"under {cap_bytes / 1e9:.1f} GB ({cap.name}): {taken.run_s:.0f} s, expected "
        f"{taken.memory['expected_s']:.0f} s; peak by formula {formula / 1e9:.2f} GB "
        f"({taken.memory['peak_parts']}), measured {taken.peak_bytes / 1e9:.2f} GB; "
        f"scratch {taken.memory['scratch_bytes']} bytes"
    )
    measured = [taken.peak_bytes / 1e6]
    return [
        compare("large", "peak memory / cap", measured, [cap_bytes / 1e6], 1.0),
        compare("large", "peak memory / formula", measured, [formula / 1e6], 1.0),
        compare("large", "seconds / expected", [taken.run_s], [expected_s(taken)], None),
    ]


def expected_s(taken: Taken) -> float:
    """Give the time that the plan named, for a division by it."""
    return max(float(str(taken.memory["expected_s"])), 1.0)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """How the kernel is made to enforce a cap."""

    name: str
    prefix: Sequence[str]
    """Goes before the command."""
    hold: Callable[[], None] | None
    """Is called in the child."""


def open_cap(cap_bytes: int) -> Cap:
    """Choose a control group where the user may have one, else a limit of data."""
    scope = [*_SCOPE, f"--property=MemoryMax={cap_bytes}", "--property=MemorySwapMax=0"]
    if shutil.which(_SCOPE[0]):
        tried = subprocess.run([*scope, "true"], capture_output=True, check=False)  # noqa: S603
        if tried.returncode == 0:
            return Cap(name="control group", prefix=scope, hold=None)
    return Cap(
        name="RLIMIT_DATA",
        prefix=(),
        hold=lambda: resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, cap_bytes)),
    )


# --- children ----------------------------------------------------------------------------------


def run(command: Sequence[str], *, cap: Callable[[], None] | None = None) -> Taken:
    """Run the command to its end, watch its memory, read its report, remove what it wrote."""
    out = WORK / "out"
    watched = watch(command, WORK / "log", cap=cap)
    report = json.loads((out / "report.json").read_text())
    shutil.rmtree(out)
    return Taken(
        duration_s=watched.duration_s,
        peak_bytes=watched.peak_bytes,
        run_s=report["duration_s"],
        memory=report["memory"],
    )


if __name__ == "__main__":
    main()
