"""Kill runs at random moments, resume them, compare every byte; started by scripts/bench.

Whole, streamed and two-rank calibrations and quantizations take turns. Each is killed with SIGKILL
somewhere between its start and its end, of two ranks now one, now their starter, now all; the run
that resumes it has to end with the file of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WORK = Path("build/faults")
PYTHON = sys.executable
PROGRAM = (PYTHON, "-m", "fp8calib")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fp8calib")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TIMEOUT_S = 600
VICTIMS = ("all", "starter", "rank")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of run: how it is started, and what has to come out."""

    name: str
    command: Sequence[str]
    expected: Mapping[str, bytes]
    duration_s: float


def main() -> None:
    """Kill and resume, print a line a fault and the count; exit code 1 when a byte differs."""
    arguments = parse_arguments()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    model, data = make_model(WORK / "model"), make_data(WORK / "rows.jsonl", arguments.sequences)
    kinds = [measure(name, command) for name, command in make_commands(model, data).items()]
    chance = random.Random(arguments.seed)  # noqa: S311 -- moments, no secrets
    count: Counter[str] = Counter()
    for number in range(arguments.faults):
        kind = kinds[number % len(kinds)]
        verdict = try_fault(kind, chance)
        count[verdict] += 1
        print(f"{number + 1:3} {kind.name:9} {verdict}", flush=True)
    print(", ".join(f"{found} {verdict}" for verdict, found in sorted(count.items())))
    shutil.rmtree(WORK)
    sys.exit(1 if any("DIFFERENT" in verdict for verdict in count) else 0)


def parse_arguments() -> argparse.Namespace:
    """Read the options; those of the other benches are taken and left aside."""
    parser = argparse.ArgumentParser(prog="scripts/bench --faults", description=__doc__)
    parser.add_argument("faults", type=int, nargs="?", default=50, help="how many (50)")
    parser.add_argument("--sequences", type=int, default=1500, help="how long each run is (1500)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(folder: Path) -> Path:
    """Make a random Llama, most of it embedding, in several shards."""
    code = (
        "import torch, transformers\n"
        "config = transformers.LlamaConfig(vocab_size=200_000, hidden_size=128, "
        "intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, "
        "num_key_value_heads=2, max_position_embeddings=256)\n"
        "torch.manual_seed(0)\n"
        "model = transformers.LlamaForCausalLM(config)\n"
        f"model.save_pretrained({str(folder)!r}, max_shard_size='60MB')\n"
    )
    subprocess.run([PYTHON, "-c", code], check=True, env=ENVIRONMENT, capture_output=True)  # noqa: S603
    return folder


def make_data(path: Path, count: int) -> Path:
    """Write rows of token ids."""
    rows = ([3 + (i * j) % 9973 for j in range(96)] for i in range(count))
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def make_commands(model: Path, data: Path) -> dict[str, list[str]]:
    """Give the command line of each kind, without its output."""
    size = ["--seq-len", "96", "--samples", "100000", "--dtype", "float32"]
    calibrate = ["calibrate", str(model), "--data", str(data), *size, "--format", "kv-scales"]
    plan = [*PROGRAM, *calibrate, "--dry-run", "--json", "--out", str(WORK / "plan")]
    done = subprocess.run(plan, check=True, env=ENVIRONMENT, capture_output=True)  # noqa: S603
    cap_gib = 0.85 * json.loads(done.stdout)["plan"]["peak_bytes"] / 2**30
    return {
        "whole": [*PROGRAM, *calibrate],
        "streamed": [*PROGRAM, *calibrate, "--memory", f"{cap_gib:.3f}"],
        "two ranks": [*TORCHRUN, *calibrate],
        "quantize": [*PROGRAM, "quantize", str(model), "--scheme", "fp8-block"],
    }


def measure(name: str, command: Sequence[str]) -> Kind:
    """Run a kind to its end, for its files and its duration."""
    started = time.monotonic()
    run(command, WORK / "expected")
    duration_s = time.monotonic() - started
    expected = read_files(WORK / "expected")
    shutil.rmtree(WORK / "expected")
    print(f"{name}: {duration_s:.1f} s", flush=True)
    return Kind(name=name, command=command, expected=expected, duration_s=duration_s)


def run(command: Sequence[str], out: Path, *more: str) -> str:
    """Run a command to its end; give what it says."""
    done = subprocess.run(  # noqa: S603
        [*command, "--out", str(out), *more],
        check=False,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        sys.exit(f"{done.stderr}\nfailed: {' '.join(command)}")
    return done.stderr


def read_files(folder: Path) -> dict[str, bytes]:
    """Read all that a run has written, but for the report, which tells times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "report.json"
    }


def try_fault(kind: Kind, chance: random.Random) -> str:
    """Kill a run at some moment, resume it, and say what came of it."""
    out = WORK / "out"
    process = subprocess.Popen(  # noqa: S603
        [*kind.command, "--out", str(out)],
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
    was_late = out.exists()
    partial = out.with_name("out.partial")
    went_on = any(partial.glob("checkpoint-0*")) or any(partial.glob("model-*.safetensors"))
    run(kind.command, out, "--resume")
    is_same = read_files(out) == kind.expected
    rests = [path.name for path in WORK.iterdir() if path.name.startswith(("out.", ".out"))]
    shutil.rmtree(out)
    if not is_same or rests:
        return f"DIFFERENT after {moment_s:.1f} s {rests}"
    state = "finished before" if was_late else "went on" if went_on else "begun anew"
    return f"identical, {state}"


def kill(process: subprocess.Popen[bytes], victims: str) -> None:
    """Kill a run, its starter or one of its ranks, and wait until the starter has ended."""
    children = find_children(process.pid)
    killed = {"all": [process.pid, *children], "starter": [process.pid], "rank": children[-1:]}
    for pid in killed[victims] or [process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=TIMEOUT_S)


def find_children(pid: int) -> list[int]:
    """List the processes that a process has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


if __name__ == "__main__":
    main()
