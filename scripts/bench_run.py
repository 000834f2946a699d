"""Measure calibration against plain forward passes; started by scripts/bench.

Imports no torch: a child's peak memory, as the kernel counts it, begins at its parent's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

SCRIPTS = Path(__file__).parent
WORK = Path("build/bench")
PYTHON = sys.executable
PROGRAM = str(Path(sys.executable).with_name("fp8calib"))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure: a ratio of two runs side by side, or a plain number of seconds."""

    section: str
    name: str
    median: float
    lowest: float
    highest: float
    unit: str
    """`ratio` or `s`."""
    target: float | None
    """At most this; None for what is only shown."""
    numerator: float | None = None
    """Median of the upper side alone: seconds, MB of peak memory, or tokens a second."""
    denominator: float | None = None

    @property
    def verdict(self) -> str:
        """`ok`, `over`, or nothing where no target is set."""
        if self.target is None:
            return ""
        return "ok" if self.median <= self.target else "over"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A child process that ended well."""

    duration_s: float
    peak_mb: float


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, resolved."""

    model: str
    tokens: Path
    num_sequences: int
    num_tokens: int
    rounds: int
    device: str
    peers_python: str | None


def main() -> None:
    """Measure, print a line a figure, write the JSON file."""
    arguments = parse_arguments()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    bench, machine = prepare(arguments)
    print(describe(bench, machine), flush=True)
    sections = [show([measure_help()])]
    for dtype in choose_dtypes(arguments.dtype, bench.device):
        sections.append(show(measure_passes(bench, dtype)))
        sections.append(show(measure_commands(bench, dtype)))
        sections.append(show(measure_verification(bench, dtype)))
        if bench.peers_python:
            sections.append(show(measure_peers(bench, dtype)))
    figures = [figure for section in sections for figure in section]
    machine["load_average_at_end"] = os.getloadavg()[0]
    print(f"load average at the end: {machine['load_average_at_end']:.1f}")
    if arguments.json:
        save(arguments.json, bench, machine, figures)
    shutil.rmtree(WORK)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; scripts/bench itself adds the first two options."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.split(";")[0])
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--samples", type=int, default=16, help="sequences (default 16)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each (default 512)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of 4 x 128 tokens: tries the script out"
    )
    parser.add_argument(
        "--peers", action="store_true", help="llm-compressor and ModelOpt too (in .venv-peers)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.samples) < 1 or arguments.seq_len < 2:
        parser.error("--rounds and --samples are 1 or more, --seq-len 2 or more")
    if arguments.quick:
        arguments.rounds, arguments.samples, arguments.seq_len = 2, 4, 128
    return arguments


def prepare(arguments: argparse.Namespace) -> tuple[Bench, dict[str, object]]:
    """Write the tokens once, for all sides, and learn what machine this is."""
    tokens = WORK / "tokens.jsonl"
    size = [str(arguments.samples), str(arguments.seq_len)]
    told = read_json([PYTHON, script("bench_tokens.py"), arguments.model, str(tokens), *size])
    machine: dict[str, object] = {
        **told,
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
    }
    bench = Bench(
        model=arguments.model,
        tokens=tokens,
        num_sequences=arguments.samples,
        num_tokens=arguments.seq_len,
        rounds=arguments.rounds,
        device="cuda:0" if told["gpu"] and arguments.device == "auto" else "cpu",
        peers_python=arguments.peers_python if arguments.peers else None,
    )
    return bench, machine


def describe(bench: Bench, machine: Mapping[str, object]) -> str:
    """Say on what, and under which load, the figures were taken."""
    where = machine["gpu"] if bench.device != "cpu" else f"CPU, {machine['cores']} cores"
    bfloat16 = {True: "multiplies bfloat16 itself", False: "emulates bfloat16", None: ""}
    known = bfloat16[machine["cpu_bfloat16"]] if bench.device == "cpu" else ""  # type: ignore[index]
    facts = [
        f"{Path(bench.model).name}, {bench.num_sequences} x {bench.num_tokens} tokens",
        f"{bench.rounds} rounds",
        str(where),
        known,
        f"{machine['threads']} threads",
        f"torch {machine['torch']}, transformers {machine['transformers']}",
        f"load average at the start: {machine['load_average_at_start']:.1f}",
    ]
    return "\n".join(fact for fact in facts if fact)


def choose_dtypes(asked: str, device: str) -> Sequence[str]:
    """Both by default; on a GPU nobody calibrates in float32."""
    if asked != "both":
        return [asked]
    return ["float32", "bfloat16"] if device == "cpu" else ["bfloat16"]


# --- what is measured --------------------------------------------------------------------------


def measure_help() -> Figure:
    """Time `fp8calib --help`."""
    seconds = [run([PROGRAM, "--help"]).duration_s for _ in range(10)]
    return Figure(
        section="start",
        name="fp8calib --help",
        median=statistics.median(seconds),
        lowest=min(seconds),
        highest=max(seconds),
        unit="s",
        target=0.35,
    )


def measure_passes(bench: Bench, dtype: str) -> list[Figure]:
    """Time the calibration pass, a plain forward and the decoder alone, in one process."""
    command = worker(PYTHON, "bench_pass.py", bench, dtype, str(bench.rounds))
    seconds = read_json(command)
    ours = seconds["calibrate"]
    return [
        compare(dtype, "pass / plain model(input_ids)", ours, seconds["plain"], 0.85),
        compare(dtype, "pass / decoder body alone", ours, seconds["body"], 1.05),
    ]


def measure_commands(bench: Bench, dtype: str) -> list[Figure]:
    """Run whole processes in turn: the command, the bare script, and ModelOpt with `--peers`."""
    out = WORK / "out"
    plain = worker(PYTHON, "bench_plain.py", bench, dtype)
    commands = {"ours": calibrate_command(bench, dtype, out), "plain": plain}
    if bench.peers_python:
        commands["modelopt"] = worker(
            bench.peers_python, "bench_modelopt.py", bench, dtype, str(out)
        )
    taken = run_in_turn(commands, rounds=bench.rounds, out=out)
    duration = {name: [each.duration_s for each in runs] for name, runs in taken.items()}
    peak = {name: [each.peak_mb for each in runs] for name, runs in taken.items()}
    figures = [
        compare(dtype, "peak memory / bare script", peak["ours"], peak["plain"], 1.15),
        compare(dtype, "command / bare script", duration["ours"], duration["plain"], 0.95),
    ]
    if "modelopt" in taken:
        figures += [
            compare(dtype, "command / ModelOpt job", duration["ours"], duration["modelopt"], 0.85),
            compare(dtype, "peak memory / ModelOpt job", peak["ours"], peak["modelopt"], None),
        ]
    return figures


def measure_verification(bench: Bench, dtype: str) -> list[Figure]:
    """Time a verification's three passes (reference, candidate, scale-1.0); measure its memory."""
    command = worker(PYTHON, "bench_verify.py", bench, dtype, str(bench.rounds))
    seconds = read_json(command)
    figures = [
        compare(
            dtype,
            f"verify pass, {name} / plain model(input_ids)",
            [whole / 3 for whole in seconds[name]],
            seconds["plain"],
            1.2,
        )
        for name in ("kv", "w8a8")
    ]
    commands = {
        "plain": worker(PYTHON, "bench_plain.py", bench, dtype),
        "kv": verify_command(bench, dtype),
        "w8a8": verify_command(bench, dtype, "--scheme", "fp8-dynamic"),
    }
    taken = run_in_turn(commands, rounds=1, out=WORK / "out")
    peak = {name: [each.peak_mb for each in runs] for name, runs in taken.items()}
    return figures + [
        compare(dtype, f"verify {name}: peak memory / bare script", peak[name], peak["plain"], 1.3)
        for name in ("kv", "w8a8")
    ]


def measure_peers(bench: Bench, dtype: str) -> list[Figure]:
    """Time the peers' passes against a plain forward, in one process of theirs."""
    assert bench.peers_python is not None  # noqa: S101 -- called with --peers only
    seconds = read_json(
        worker(bench.peers_python, "bench_peer_pass.py", bench, dtype, str(bench.rounds))
    )
    names = {
        "modelopt": "ModelOpt calibrate / plain model(input_ids)",
        "llmcompressor_basic": "llm-compressor basic / plain model(input_ids)",
        "llmcompressor_sequential": "llm-compressor sequential / plain model(input_ids)",
    }
    return [
        compare(dtype, title, seconds[name], seconds["plain"], None)
        for name, title in names.items()
    ]


def compare(
    section: str,
    name: str,
    upper: Sequence[float],
    lower: Sequence[float],
    target: float | None,
) -> Figure:
    """Divide round by round, so that a slow minute of the machine meets both sides."""
    ratios = [a / b for a, b in zip(upper, lower, strict=True)]
    return Figure(
        section=section,
        name=name,
        median=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        unit="ratio",
        target=target,
        numerator=statistics.median(upper),
        denominator=statistics.median(lower),
    )


# --- child processes ---------------------------------------------------------------------------


def calibrate_command(bench: Bench, dtype: str, out: Path) -> list[str]:
    """Give the command line that is measured."""
    size = ["--samples", str(bench.num_sequences), "--seq-len", str(bench.num_tokens)]
    where = ["--dtype", dtype, "--device", bench.device, "--out", str(out)]
    return [PROGRAM, "calibrate", bench.model, "--data", str(bench.tokens), *size, *where]


def verify_command(bench: Bench, dtype: str, *more: str) -> list[str]:
    """Give the command line of a verification."""
    size = ["--samples", str(bench.num_sequences), "--seq-len", str(bench.num_tokens)]
    where = ["--dtype", dtype, "--device", bench.device, "--json"]
    return [PROGRAM, "verify", bench.model, "--data", str(bench.tokens), *size, *where, *more]


def worker(python: str, name: str, bench: Bench, dtype: str, *more: str) -> list[str]:
    """Give the command line of a worker script: they all begin alike."""
    return [python, script(name), bench.model, str(bench.tokens), dtype, bench.device, *more]


def script(name: str) -> str:
    """Give the path of a worker script."""
    return str(SCRIPTS / name)


def run_in_turn(
    commands: Mapping[str, Sequence[str]], *, rounds: int, out: Path
) -> dict[str, list[Finished]]:
    """Run every command once a round; rounds begin with another one in turn."""
    names = list(commands)
    taken: dict[str, list[Finished]] = {name: [] for name in names}
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            taken[name].append(run(commands[name]))
            shutil.rmtree(out, ignore_errors=True)
    return taken


def run(command: Sequence[str]) -> Finished:
    """Run a child to its end; only its own peak memory is counted."""
    log = WORK / "log"
    with log.open("wb") as file:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)  # noqa: S603
        _, status, usage = os.wait4(child.pid, 0)
        duration_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{log.read_text(errors='replace')}\nfailed: {' '.join(command)}")
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Finished(duration_s=duration_s, peak_mb=usage.ru_maxrss * unit / 1e6)


def read_json(command: Sequence[str]) -> dict:
    """Run a worker and read the JSON object that its last line holds."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        sys.exit(f"{done.stderr}\nfailed: {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


# --- output ------------------------------------------------------------------------------------


def show(figures: list[Figure]) -> list[Figure]:
    """Print a line a figure, and give them back."""
    for figure in figures:
        print(format_figure(figure), flush=True)
    return figures


def format_figure(figure: Figure) -> str:
    """Give name, median [lowest-highest], both sides, target and verdict in one line."""
    unit = " s" if figure.unit == "s" else ""
    line = (
        f"{figure.section:9}{figure.name:51}{figure.median:5.2f} "
        f"[{figure.lowest:.2f}-{figure.highest:.2f}]{unit}"
    )
    if figure.target is not None:
        line += f"  target {figure.target:.2f}  {figure.verdict}"
    if figure.numerator is not None:
        named = {"memory": "MB", "tokens/s": "tokens/s"}
        sides = next((unit for word, unit in named.items() if word in figure.name), "s")
        digits = 0 if sides == "MB" else 1
        line += f"  ({figure.numerator:.{digits}f} / {figure.denominator:.{digits}f} {sides})"
    return line


def save(
    path: Path, bench: Bench, machine: Mapping[str, object], figures: Sequence[Figure]
) -> None:
    """Write everything as one JSON object."""
    about = {
        "model": Path(bench.model).name,
        "sequences": bench.num_sequences,
        "tokens_each": bench.num_tokens,
        "rounds": bench.rounds,
        "device": bench.device,
        "machine": machine,
    }
    save_figures(path, figures, about)


def save_figures(
    path: Path, figures: Sequence[Figure], about: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Write figures, after what is to be said about them, as one JSON object."""
    found = [{**asdict(figure), "verdict": figure.verdict} for figure in figures]
    path.write_text(json.dumps({**about, "figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
