"""Measure calibration and verification on a GPU, against the model itself and other tools.

Started by `scripts/bench --gpu`. Random Llamas are made on the device. Prints a markdown table with
the name of the card; a row that time does not suffice for, or whose program does not start, says
so. Imports no torch (see `child_process`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmarks.child_process import PROGRAM, run_arguments, worker
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser

WORK = Path("build/bench-gpu")
TOKENS = WORK / "tokens.jsonl"
DTYPE = "bfloat16"
SHAPES = "1B=16,2048,8192,32,8,128256;8B=32,4096,14336,32,8,128256"
CALIBRATION = "pass of `calibrate` / the model's body"
VERIFY = {
    "reference": ("pass of `verify --engine reference`, kv / plain forward", 2.3),
    "vllm": ("the same with vLLM's arithmetic", 4.0),
    "w8a8": ("the same, `fp8-static`", 2.6),
}
COMMAND = "whole command / bare script"
PEERS = {
    "llm-compressor": ("whole command / llm-compressor `oneshot`", 0.5),
    "ModelOpt": ("whole command / ModelOpt `mtq.quantize` and export", 1.0),
}
STREAMED = "streamed under 4 GB of GPU memory / the bus alone"
OFFLOADED = 'the same / accelerate, `device_map="auto"`'
TARGETS = {
    CALIBRATION: 1.1,
    **dict(VERIFY.values()),
    COMMAND: 1.25,
    **dict(PEERS.values()),
    STREAMED: 1.5,
    OFFLOADED: 1.0,
}


class NotMeasuredError(Exception):
    """A row has no figure; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The benchmark of one model."""

    options: Namespace
    model: Path
    deadline: float
    """Of `time.monotonic`."""

    def seconds(self, module: str, *more: object) -> Mapping[str, Any]:
        """Run a worker in this environment, and read the JSON object in its last line."""
        arguments = (self.model, TOKENS, DTYPE, self.options.device, *more)
        read: Mapping[str, Any] = json.loads(self.call(worker(module, *arguments)).splitlines()[-1])
        return read

    def time(self, command: Sequence[str]) -> float:
        """Time a whole process."""
        shutil.rmtree(WORK / "out", ignore_errors=True)
        started = time.monotonic()
        self.call(command)
        return time.monotonic() - started

    def call(self, command: Sequence[str]) -> str:
        """Run a program to its end, and give its stdout.

        Raises:
            NotMeasuredError: it does not start, fails, or takes longer than there is time for.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise NotMeasuredError("no time was left")
        try:
            done = subprocess.run(  # noqa: S603
                [str(part) for part in command],
                capture_output=True,
                text=True,
                check=False,
                timeout=left,
            )
        except OSError as error:
            raise NotMeasuredError(f"does not start: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise NotMeasuredError("no time was left") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise NotMeasuredError(f"does not run: {lines[-1][:120]}")
        return done.stdout

    # --- rows -------------------------------------------------------------------------------------

    def measure_pass(self) -> Iterator[tuple[str, float]]:
        """Compare the pass of calibration with the model's body."""
        seconds = self.seconds("workers.calibration_pass", self.options.rounds)
        yield CALIBRATION, _ratio(seconds["calibrate"], seconds["body"])

    def measure_commands(self) -> Iterator[tuple[str, float]]:
        """Compare the whole command with a bare script, and with the tools that start."""
        given = run_arguments(self.options, TOKENS, DTYPE)
        device, out = self.options.device, str(WORK / "out")
        command = [PROGRAM, "calibrate", str(self.model), *given]
        command += ["--recipe", "w8a8-static", "--device", device, "--out", out]
        plain = worker("workers.plain_forward", self.model, TOKENS, DTYPE, device)
        self.time(plain)  # the files are in the page cache for both
        ours = self.time(command)
        yield COMMAND, ours / self.time(plain)
        modules = {
            "llm-compressor": "peers.llmcompressor_calibration",
            "ModelOpt": "peers.modelopt_calibration",
        }
        for name, (row, _) in PEERS.items():
            arguments = (self.model, TOKENS, DTYPE, device, out)
            peer = worker(modules[name], *arguments, python=self.options.peers_python)
            try:
                yield row, ours / self.time(peer)
            except NotMeasuredError as error:
                print(f"{self.model.name}: {row}: {name} {error}", flush=True)

    def measure_verification(self) -> Iterator[tuple[str, float]]:
        """Compare a reference and one candidate with a plain forward pass."""
        seconds = self.seconds("workers.verification_pass", self.options.rounds)
        for name, (row, _) in VERIFY.items():
            yield row, _ratio(seconds[name], seconds["plain"])

    def measure_streamed(self) -> Iterator[tuple[str, float]]:
        """Compare a streamed run with copying the weights to the GPU, and with accelerate."""
        if self.options.device == "cpu":
            raise NotMeasuredError("needs a GPU")
        seconds = self.seconds("workers.streamed_pass", self.options.device_gb)
        yield STREAMED, seconds["streamed"] / seconds["bus"]
        peer = self.seconds("workers.offloaded_pass", self.options.device_gb)
        yield OFFLOADED, seconds["streamed"] / peer["offloaded"]


def main() -> None:
    """Measure, print a table."""
    options = parse_options()
    deadline = time.monotonic() + 60 * options.minutes
    with work_folder(WORK):
        shapes = dict(each.split("=") for each in options.shapes.split(";"))
        write_random_tokens(options, min(int(shape.split(",")[-1]) for shape in shapes.values()))
        figures: dict[str, dict[str, float | str]] = {}
        card = ""
        for number, (name, shape) in enumerate(shapes.items()):
            # a half of the time for the first of two models
            share = (deadline - time.monotonic()) / (len(shapes) - number)
            run = Run(options=options, model=WORK / name, deadline=time.monotonic() + share)
            made = worker("workers.make_llama", run.model, shape, options.device)
            try:
                card = run.call(made).splitlines()[-1]
                figures[name] = measure(run)
            except NotMeasuredError as error:
                print(f"{name}: {error}", flush=True)
                figures[name] = {}
            shutil.rmtree(run.model, ignore_errors=True)
        print(*make_table(card, options, figures), sep="\n")
        if options.json:
            options.json.write_text(json.dumps({"card": card, "figures": figures}, indent=2) + "\n")


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--gpu", __doc__, rounds=2, samples=64)
    parser.set_defaults(seq_len=2048)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all rows (8)")
    parser.add_argument("--device-gb", type=float, default=4.0, help="GPU memory when streamed (4)")
    parser.add_argument(
        "--shapes",
        default=SHAPES,
        metavar="NAME=L,C,I,H,K,V;...",
        help="layers, width, inner width, heads, KV heads and words of each model",
    )
    return parser.parse_args()


def write_random_tokens(options: Namespace, num_words: int) -> None:
    """Write rows of token ids."""
    source = random.Random(0)  # noqa: S311 -- text, no secrets
    rows = (source.choices(range(3, num_words), k=options.seq_len) for _ in range(options.samples))
    TOKENS.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def measure(run: Run) -> dict[str, float | str]:
    """Measure the rows of a model; those without a figure say why."""
    found: dict[str, float | str] = {}
    parts: Sequence[Callable[[], Iterator[tuple[str, float]]]] = (
        run.measure_pass,
        run.measure_verification,
        run.measure_streamed,
        run.measure_commands,  # other tools may take the rest of the time
    )
    for part in parts:
        try:
            for row, ratio in part():
                found[row] = ratio
                print(f"{run.model.name}: {row}: {ratio:.2f}", flush=True)
        except NotMeasuredError as error:
            print(f"{run.model.name}: {part.__name__}: {error}", flush=True)
            found[part.__name__] = str(error)
    return found


def make_table(
    card: str, options: Namespace, figures: Mapping[str, Mapping[str, float | str]]
) -> Iterator[str]:
    """Make the table of all rows; `open` where there is no figure."""
    yield f"\n{card}, {options.samples} x {options.seq_len:,} tokens, {DTYPE}:\n"
    yield f"| figure | {' | '.join(figures)} | target |"
    yield "|---|" + "---|" * (len(figures) + 1)
    for row, target in TARGETS.items():
        cells = [found.get(row, "open") for found in figures.values()]
        texts = [each if isinstance(each, str) else f"{each:.2f}" for each in cells]
        yield f"| {row} | {' | '.join(texts)} | {target} |"


def _ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    return median(a / b for a, b in zip(upper, lower, strict=True))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
