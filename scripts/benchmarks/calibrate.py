"""Measure calibration and verification against plain forward passes.

Started by `scripts/bench`. Imports no torch (see `child_process`).
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.child_process import (
    PROGRAM,
    PYTHON,
    Usage,
    measure,
    read_json,
    run_arguments,
    worker,
    write_tokens,
)
from scripts.benchmarks.figures import Figure, compare, report, summarize, take_turns, work_folder
from scripts.benchmarks.options import make_parser

WORK = Path("build/bench")
TOKENS = WORK / "tokens.jsonl"
OUT = WORK / "out"
PEAK = "peak_resident_mb"


def main() -> None:
    """Measure, print a line per figure, write the JSON file."""
    options = parse_options()
    with work_folder(WORK):
        machine = {**write_tokens(options, TOKENS), "cores": os.cpu_count()}
        options.device = "cuda:0" if machine["gpu"] and options.device == "auto" else "cpu"
        print(describe(options, machine), flush=True)
        report(measure_all(options), options.json, summarize_options(options, machine))


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser(
        "", __doc__, rounds=5, samples=16, dtypes=("both", "float32", "bfloat16"), has_peers=True
    )
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of 4 x 128 tokens, to try the script"
    )
    options = parser.parse_args()
    if min(options.rounds, options.samples) < 1 or options.seq_len < 2:
        parser.error("--rounds and --samples are 1 or more, --seq-len 2 or more")
    if options.quick:
        options.rounds, options.samples, options.seq_len = 2, 4, 128
    return options


def describe(options: Namespace, machine: Mapping[str, Any]) -> str:
    """Describe the model, the amount of text and the machine, one fact per line."""
    is_cpu = options.device == "cpu"
    bfloat16 = {True: "multiplies bfloat16 natively", False: "emulates bfloat16", None: ""}
    facts = [
        f"{Path(options.model).name}, {options.samples} x {options.seq_len} tokens",
        f"{options.rounds} rounds",
        f"CPU, {machine['cores']} cores" if is_cpu else str(machine["gpu"]),
        bfloat16[machine["cpu_bfloat16"]] if is_cpu else "",
        f"{machine['threads']} threads",
        f"torch {machine['torch']}, transformers {machine['transformers']}",
    ]
    return "\n".join(fact for fact in facts if fact)


def summarize_options(options: Namespace, machine: Mapping[str, object]) -> dict[str, object]:
    """Build what the JSON file contains besides the figures."""
    return {
        "model": Path(options.model).name,
        "sequences": options.samples,
        "tokens_each": options.seq_len,
        "rounds": options.rounds,
        "device": options.device,
        "machine": machine,
    }


# --- measurements ------------------------------------------------------------------------------


def measure_all(options: Namespace) -> Iterator[Figure]:
    """Measure the start of the program, then everything else in each dtype."""
    yield measure_help()
    for dtype in choose_dtypes(options.dtype, options.device):
        yield from measure_passes(options, dtype)
        yield from measure_commands(options, dtype)
        yield from measure_verification(options, dtype)
        if options.peers:
            yield from measure_peers(options, dtype)


def choose_dtypes(requested: str, device: str) -> Sequence[str]:
    """List the dtypes: for `both` on a GPU only bfloat16, in which calibrations run there."""
    if requested != "both":
        return [requested]
    return ["float32", "bfloat16"] if device == "cpu" else ["bfloat16"]


def measure_help() -> Figure:
    """Time `fp8calib --help`."""
    seconds = [measure([PROGRAM, "--help"], WORK / "log").duration_s for _ in range(10)]
    return summarize("start", "fp8calib --help", seconds, unit="s", target=0.35)


def measure_passes(options: Namespace, dtype: str) -> Iterator[Figure]:
    """Time the calibration pass, a plain forward and the decoder alone, in one process."""
    seconds = read_json(*pass_worker("workers.calibration_pass", options, dtype, options.rounds))
    ours = seconds["calibrate"]
    yield compare(dtype, "pass / plain model(input_ids)", ours, seconds["plain"], 0.85)
    yield compare(dtype, "pass / decoder body alone", ours, seconds["body"], 1.05)


def measure_commands(options: Namespace, dtype: str) -> Iterator[Figure]:
    """Run whole processes in turn: the command, the bare script, and ModelOpt with `--peers`."""
    commands = {
        "ours": program("calibrate", options, dtype, "--out", str(OUT)),
        "plain": pass_worker("workers.plain_forward", options, dtype),
    }
    if options.peers:
        module, python = "peers.modelopt_calibration", options.peers_python
        commands["modelopt"] = pass_worker(module, options, dtype, OUT, python=python)
    usages = run_in_turn(commands, rounds=options.rounds)
    ours, plain = usages["ours"], usages["plain"]
    yield compare(dtype, "peak memory / bare script", ours, plain, 1.15, PEAK)
    yield compare(dtype, "command / bare script", ours, plain, 0.95, "duration_s")
    if options.peers:
        theirs = usages["modelopt"]
        yield compare(dtype, "command / ModelOpt job", ours, theirs, 0.85, "duration_s")
        yield compare(dtype, "peak memory / ModelOpt job", ours, theirs, None, PEAK)


def measure_verification(options: Namespace, dtype: str) -> Iterator[Figure]:
    """Time a verification's two passes (the model and one candidate); measure its memory."""
    seconds = read_json(*pass_worker("workers.verification_pass", options, dtype, options.rounds))
    kinds = {
        "reference": ("kv", 1.15),
        "vllm": ("kv as in vLLM", None),
        "w8a8": ("w8a8", 1.2),
    }
    for key, (name, target) in kinds.items():
        per_pass = [whole / 2 for whole in seconds[key]]
        title = f"verify pass, {name} / plain model(input_ids)"
        yield compare(dtype, title, per_pass, seconds["plain"], target)
    commands = {
        "plain": pass_worker("workers.plain_forward", options, dtype),
        "kv": program("verify", options, dtype, "--json"),
        "w8a8": program("verify", options, dtype, "--json", "--scheme", "fp8-dynamic"),
    }
    usages = run_in_turn(commands, rounds=1)
    for name in ("kv", "w8a8"):
        title = f"verify {name}: peak memory / bare script"
        yield compare(dtype, title, usages[name], usages["plain"], 1.3, PEAK)


def measure_peers(options: Namespace, dtype: str) -> Iterator[Figure]:
    """Time the peers' passes against a plain forward, in one process of their environment."""
    python = options.peers_python
    seconds = read_json(*pass_worker("peers.passes", options, dtype, options.rounds, python=python))
    names = {
        "modelopt": "ModelOpt calibrate",
        "llmcompressor_basic": "llm-compressor basic",
        "llmcompressor_sequential": "llm-compressor sequential",
    }
    for key, name in names.items():
        title = f"{name} / plain model(input_ids)"
        yield compare(dtype, title, seconds[key], seconds["plain"], None)


# --- child processes ---------------------------------------------------------------------------


def program(command: str, options: Namespace, dtype: str, *more: str) -> list[str]:
    """Build the command line of `fp8calib calibrate` or `verify`."""
    arguments = run_arguments(options, TOKENS, dtype)
    return [PROGRAM, command, options.model, *arguments, "--device", options.device, *more]


def pass_worker(
    module: str, options: Namespace, dtype: str, *more: object, python: str = PYTHON
) -> list[str]:
    """Build the command line of a worker that runs the tokens through the model."""
    return worker(module, options.model, TOKENS, dtype, options.device, *more, python=python)


def run_in_turn(commands: Mapping[str, Sequence[str]], *, rounds: int) -> dict[str, list[Usage]]:
    """Run every command once per round; each round begins with the next command."""
    usages: dict[str, list[Usage]] = {name: [] for name in commands}
    for name in take_turns(commands, rounds):
        usages[name].append(measure(commands[name], WORK / "log"))
        shutil.rmtree(OUT, ignore_errors=True)
    return usages


if __name__ == "__main__":
    main()
