"""Kill runs at random moments, resume them, and compare every byte.

Started by `scripts/bench --faults`. Whole, streamed and two-rank calibrations and quantizations
take turns. Each is killed with SIGKILL at a random moment; with two ranks either one rank, their
launcher or all processes. The resumed run has to write the files of a run that was not killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.child_process import PYTHON, call
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.random_llama import Llama

WORK = Path("build/faults")
MODEL, DATA, OUT = WORK / "model", WORK / "rows.jsonl", WORK / "out"
PROGRAM = (PYTHON, "-m", "fp8calib")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fp8calib")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 600
VICTIMS = ("all", "launcher", "rank")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of run: its command, the files it has to write, and how long it takes."""

    name: str
    command: Sequence[str]
    expected: Mapping[str, bytes]
    duration_s: float


def main() -> None:
    """Kill and resume, print a line per fault and the counts; exit code 1 when a byte differs."""
    options = parse_options()
    with work_folder(WORK):
        counts: Counter[str] = Counter()
        for number, (kind, verdict) in enumerate(try_faults(options), 1):
            counts[verdict] += 1
            print(f"{number:3} {kind.name:9} {verdict}", flush=True)
        print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    sys.exit(1 if any("DIFFERENT" in verdict for verdict in counts) else 0)


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--faults", __doc__)
    parser.add_argument("faults", type=int, nargs="?", default=50, help="number of runs (50)")
    parser.add_argument("--sequences", type=int, default=1500, help="length of each run (1500)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    return parser.parse_args()


def try_faults(options: Namespace) -> Iterator[tuple[Kind, str]]:
    """Measure every kind of run undisturbed, then kill and resume them in turn."""
    make_model()
    write_rows(options.sequences)
    kinds = [measure(name, command) for name, command in make_commands().items()]
    chance = random.Random(options.seed)  # noqa: S311 -- moments, no secrets
    for number in range(options.faults):
        kind = kinds[number % len(kinds)]
        yield kind, try_fault(kind, chance)


def make_model() -> None:
    """Write a random Llama that is mostly embedding."""
    Llama(layers=6, hidden=128, intermediate=256, heads=4, kv_heads=2, vocabulary=200_000).save(
        MODEL
    )


def write_rows(count: int) -> None:
    """Write rows of token ids."""
    rows = ([3 + (i * j) % 9973 for j in range(96)] for i in range(count))
    DATA.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def make_commands() -> dict[str, list[str]]:
    """Build the command line of each kind, without `--out`."""
    size = ["--seq-len", "96", "--samples", "100000", "--dtype", "float32"]
    calibrate = ["calibrate", str(MODEL), "--data", str(DATA), *size, "--format", "kv-scales"]
    plan = run([*PROGRAM, *calibrate], WORK / "plan", "--dry-run", "--json")
    cap_gib = 0.85 * json.loads(plan)["plan"]["peak_bytes"] / 2**30
    return {
        "whole": [*PROGRAM, *calibrate],
        "streamed": [*PROGRAM, *calibrate, "--memory", f"{cap_gib:.3f}"],
        "two ranks": [*TORCHRUN, *calibrate],
        "quantize": [
            *PROGRAM,
            "quantize",
            str(MODEL),
            "--scheme",
            "fp8-block",
            "--allow-unservable",
        ],
    }


def measure(name: str, command: Sequence[str]) -> Kind:
    """Run a kind undisturbed, and keep its files and its duration."""
    started = time.monotonic()
    run(command, WORK / "expected")
    duration_s = time.monotonic() - started
    expected = read_files(WORK / "expected")
    shutil.rmtree(WORK / "expected")
    print(f"{name}: {duration_s:.1f} s", flush=True)
    return Kind(name=name, command=command, expected=expected, duration_s=duration_s)


def run(command: Sequence[str], out: Path, *more: str) -> str:
    """Run a command to its end and return its stdout."""
    return call(*command, "--out", out, *more, env=ENVIRONMENT, timeout_s=TIMEOUT_S)


def read_files(folder: Path) -> dict[str, bytes]:
    """Read what a run wrote, except the report, which has times, and cards, which name it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {"report.json", "README.md"}
    }


def try_fault(kind: Kind, chance: random.Random) -> str:
    """Kill a run at a random moment, resume it, and return the verdict."""
    process = subprocess.Popen(  # noqa: S603
        [*kind.command, "--out", str(OUT)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    moment_s = chance.uniform(0, kind.duration_s)
    victims = chance.choice(VICTIMS)
    try:
        process.wait(timeout=moment_s)
    except subprocess.TimeoutExpired:
        kill(process, victims if kind.name == "two ranks" else "all")
    had_finished = OUT.exists()
    partial = OUT.with_name("out.partial")
    had_kept = any(partial.glob("checkpoint-0*")) or any(partial.glob("model-*.safetensors"))
    run(kind.command, OUT, "--resume")
    is_same = read_files(OUT) == kind.expected
    leftovers = [path.name for path in WORK.iterdir() if path.name.startswith(("out.", ".out"))]
    shutil.rmtree(OUT)
    if not is_same or leftovers:
        return f"DIFFERENT after {moment_s:.1f} s {leftovers}"
    state = "had finished" if had_finished else "resumed" if had_kept else "started over"
    return f"identical, {state}"


def kill(process: subprocess.Popen[bytes], victims: str) -> None:
    """Kill a run, its launcher or one of its ranks, and wait until the launcher has ended."""
    children = find_children(process.pid)
    killed = {"all": [process.pid, *children], "launcher": [process.pid], "rank": children[-1:]}
    for pid in killed[victims] or [process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=TIMEOUT_S)


def find_children(pid: int) -> list[int]:
    """List the child processes of a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


if __name__ == "__main__":
    main()
