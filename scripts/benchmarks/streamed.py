"""Time a streamed calibration against a whole one, and run a large model under a small cap.

Started by `scripts/bench --streamed`. The large model is a random Llama of 3B parameters. The
kernel limits its run to 3 GB: with a control group where systemd allows one, else with RLIMIT_DATA.
Imports no torch (see `child_process`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.child_process import PROGRAM, Usage, measure, run_arguments, write_tokens
from scripts.benchmarks.figures import Figure, compare, report, take_turns, work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.random_llama import Llama

WORK = Path("build/bench-streamed")
OUT = WORK / "out"
SHAPE_3B = (28, 3072, 8192, 24, 8, 128256)
"""Layers, width, inner width, heads, KV heads, words: 3.2 billion parameters, 6.4 GB."""


def main() -> None:
    """Measure, and print a line per figure."""
    options = parse_options()
    with work_folder(WORK):
        report(measure_all(options), options.json)


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser(
        "--streamed", __doc__, rounds=3, samples=16, dtypes=("float32", "bfloat16")
    )
    parser.add_argument("--small-alone", action="store_true", help="without the large model")
    parser.add_argument("--large-alone", action="store_true", help="only the large model")
    parser.add_argument(
        "--shape",
        default=",".join(map(str, SHAPE_3B)),
        metavar="L,C,I,H,K,V",
        help="layers, width, inner width, heads, KV heads and words of the large model",
    )
    parser.add_argument(
        "--cap-gb", type=float, default=3.0, help="memory limit of the large model (3 GB)"
    )
    return parser.parse_args()


def measure_all(options: Namespace) -> Iterator[Figure]:
    """Measure both parts, or the selected one."""
    if not options.large_alone:
        yield from measure_overhead(options)
    if not options.small_alone:
        yield from measure_large(options)


# --- a model that fits -------------------------------------------------------------------------


def measure_overhead(options: Namespace) -> Iterator[Figure]:
    """Run the whole command whole and streamed in turn."""
    tokens = WORK / "tokens.jsonl"
    write_tokens(options, tokens)
    whole = calibrate_command(options.model, tokens, options, options.dtype)
    commands = {"whole": whole, "streamed": [*whole, "--memory", find_smallest_cap(whole)]}
    usages: dict[str, list[Usage]] = {"streamed": [], "whole": []}
    planned_mb = []
    run(whole)  # warms the page cache
    for name in take_turns(usages, options.rounds):
        usage, found = run(commands[name], is_streamed=name == "streamed")
        usages[name].append(usage)
        if name == "streamed":
            planned_mb.append(found["memory"]["peak_bytes"] / 1e6)
    dtype, both = options.dtype, (usages["streamed"], usages["whole"])
    peaks = [usage.peak_anonymous_mb for usage in usages["streamed"]]
    yield compare(dtype, "streamed / whole", *both, 1.15, "duration_s")
    yield compare(dtype, "streamed: peak memory / whole", *both, None, "peak_anonymous_mb")
    yield compare(dtype, "streamed: peak memory / formula", peaks, planned_mb, 1.0)


def find_smallest_cap(command: Sequence[str]) -> str:
    """Run with a cap that is too small: the error names the smallest one that works."""
    refused = subprocess.run(  # noqa: S603
        [*command, "--memory", "0.01"], capture_output=True, text=True, check=False
    )
    found = re.search(r"the smallest --memory that works is (\S+);", refused.stderr)
    if found is None:
        sys.exit(f"{refused.stderr}\nthe error names no smallest --memory")
    return found.group(1)


# --- a model that does not fit -----------------------------------------------------------------


def measure_large(options: Namespace) -> Iterator[Figure]:
    """Calibrate a large random model under a cap that the kernel enforces."""
    folder, tokens = WORK / "large", WORK / "large.jsonl"
    layers, hidden, intermediate, heads, kv_heads, words = map(int, options.shape.split(","))
    llama = Llama(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=words,
        is_tied=True,
    )
    parameters = llama.save(folder)
    rows = [
        {"input_ids": [(7 * row + 11 * i) % words for i in range(options.seq_len)]}
        for row in range(options.samples)
    ]
    tokens.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cap_bytes = int(options.cap_gb * 1e9)
    command = calibrate_command(str(folder), tokens, options, "bfloat16")
    command += ["--memory", f"{cap_bytes / 2**30:.4f}"]
    scope = find_control_group(cap_bytes)
    usage, found = run([*scope, *command], is_streamed=True, cap_bytes=None if scope else cap_bytes)
    memory, run_s, peak_mb = found["memory"], found["duration_s"], usage.peak_anonymous_mb
    print(
        f"{parameters / 1e9:.2f} billion parameters ({2 * parameters / 1e9:.2f} GB) under "
        f"{options.cap_gb:.1f} GB ({'control group' if scope else 'RLIMIT_DATA'}): "
        f"{run_s:.0f} s; peak by formula "
        f"{memory['peak_bytes'] / 1e9:.2f} GB ({memory['peak_parts']}), measured "
        f"{peak_mb / 1e3:.2f} GB; scratch {memory['scratch_bytes']} bytes"
    )
    formula_mb = memory["peak_bytes"] / 1e6
    yield compare("large", "peak memory / cap", [peak_mb], [cap_bytes / 1e6], 1.0)
    yield compare("large", "peak memory / formula", [peak_mb], [formula_mb], 1.0)


def find_control_group(cap_bytes: int) -> list[str]:
    """Return the start of a command line that runs in a capped control group; empty if none is."""
    scope = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
    scope += [f"--property=MemoryMax={cap_bytes}", "--property=MemorySwapMax=0"]
    if not shutil.which(scope[0]):
        return []
    tried = subprocess.run([*scope, "true"], capture_output=True, check=False)  # noqa: S603
    return [] if tried.returncode else scope


# --- children ----------------------------------------------------------------------------------


def calibrate_command(model: str, tokens: Path, options: Namespace, dtype: str) -> list[str]:
    """Build the command line that is measured."""
    arguments = run_arguments(options, tokens, dtype)
    return [PROGRAM, "calibrate", model, *arguments, "--out", str(OUT), "--format", "kv-scales"]


def run(
    command: Sequence[str], *, is_streamed: bool = False, cap_bytes: int | None = None
) -> tuple[Usage, dict[str, Any]]:
    """Measure a calibration, read its report, and remove what it wrote."""
    usage = measure(command, WORK / "log", cap_bytes=cap_bytes)
    found = json.loads((OUT / "report.json").read_text())
    shutil.rmtree(OUT)
    if is_streamed and not found["memory"]["streamed"]:
        sys.exit("the model was not streamed")
    return usage, found


if __name__ == "__main__":
    main()
