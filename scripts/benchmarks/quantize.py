"""Time quantize against `cp` of the same checkpoint, and against llm-compressor's data-free path.

Started by `scripts/bench --quantize`. The checkpoint is a random Llama with the layer sizes of 8B,
in many shards. Imports neither torch nor numpy (see `child_process`).
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp8calib.numerics.schemes import list_without_calibration
from scripts.benchmarks.child_process import PROGRAM, PYTHON, Usage, call, measure
from scripts.benchmarks.figures import Figure, compare, report, work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.random_llama import Llama

WORK = Path("build/bench-quantize")
SECTION = "quantize"
SOURCE, OUT = WORK / "source", WORK / "out"
SCHEMES = list_without_calibration()
CAP_BYTES = 1_500_000_000
"""Limit of quantize's writable private memory."""
NUM_LAYERS = 17
"""One shard each: 8 GB of bfloat16 in all."""
NUM_PEER_LAYERS = 6
"""Of the model that llm-compressor is timed on: 3.1 GB."""
PEER = (
    "import sys; from llmcompressor import model_free_ptq; "
    "model_free_ptq(sys.argv[1], sys.argv[2], scheme='FP8_DYNAMIC', ignore=['lm_head', "
    "'re:.*embed.*', 're:.*norm.*'], max_workers=1, device='cpu')"
)


def main() -> None:
    """Build the checkpoints, measure, print a line per figure."""
    options = parse_options()
    with work_folder(WORK):
        report(measure_all(options), options.json)


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--quantize", __doc__, rounds=3, has_peers=True)
    parser.add_argument(
        "--layers",
        type=int,
        default=NUM_LAYERS,
        help=f"of 0.44 GB each (default {NUM_LAYERS}: 8 GB, which needs 20 GB of disk)",
    )
    return parser.parse_args()


def measure_all(options: Namespace) -> Iterator[Figure]:
    """Measure against `cp`, and with `--peers` against llm-compressor."""
    make_source(options.layers)
    warm = run_in_turn(options.rounds, is_cold=False)
    cold = run_in_turn(1, is_cold=True)
    for cache, usages, target in (("warm", warm, 3.0), ("cold", cold, None)):
        for scheme in SCHEMES:
            name = f"{scheme} / cp, {cache}"
            yield compare(SECTION, name, usages[scheme], usages["cp"], target, "duration_s")
    for scheme in SCHEMES:
        name, peak_mb = f"{scheme}: peak memory / cap", warm[scheme][0].peak_anonymous_mb
        yield compare(SECTION, name, [peak_mb], [CAP_BYTES / 1e6], 1.0)
    yield measure_dequantize(options.rounds)
    if options.peers:
        make_source(min(options.layers, NUM_PEER_LAYERS))
        ours = [run(quantize_command("fp8-dynamic"))]
        theirs = [run([options.peers_python, "-c", PEER, str(SOURCE), str(OUT)])]
        name = "fp8-dynamic / model_free_ptq"
        yield compare(SECTION, name, ours, theirs, 0.2, "duration_s")
        name = "fp8-dynamic: peak memory / its own"
        yield compare(SECTION, name, ours, theirs, 0.5, "peak_anonymous_mb")


def make_source(layers: int) -> None:
    """Write the checkpoint that is quantized."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    Llama(
        layers=layers,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        vocabulary=32000,
    ).save(SOURCE)


def run_in_turn(rounds: int, *, is_cold: bool) -> Mapping[str, Sequence[Usage]]:
    """Copy and quantize in turn, with the source in the page cache or not."""
    usages: dict[str, list[Usage]] = {name: [] for name in ("cp", *SCHEMES)}
    for _ in range(rounds):
        for name, runs in usages.items():
            if name == "cp":
                runs.append(run(["cp", "-r", str(SOURCE), str(OUT)], is_cold=is_cold))
            else:
                command = quantize_command(name)
                runs.append(run(command, is_cold=is_cold, cap_bytes=CAP_BYTES))
    return usages


def measure_dequantize(rounds: int) -> Figure:
    """Measure dequantize, without the time that importing torch takes, against `cp` of its result.

    The result is as big as the source, which is what `cp` copies.
    """
    child = WORK / "child"
    call(PROGRAM, "quantize", SOURCE, "--scheme", "fp8-dynamic", "--out", child)
    seconds, copies = [], []
    for _ in range(rounds):
        copies.append(run(["cp", "-r", str(SOURCE), str(OUT)]).duration_s)
        prepare_page_cache(is_cold=False, folder=child)
        usage = measure([PROGRAM, "dequantize", str(child), "--out", str(OUT)], WORK / "log")
        shutil.rmtree(OUT)
        started = measure([PYTHON, "-c", "import torch"], WORK / "log").duration_s
        seconds.append(usage.duration_s - started)
    return compare(SECTION, "dequantize without import torch / cp, warm", seconds, copies, 1.5)


def quantize_command(scheme: str) -> list[str]:
    """Build the command line that is measured."""
    return [PROGRAM, "quantize", str(SOURCE), "--scheme", scheme, "--out", str(OUT), "--json"]


def run(command: Sequence[str], *, is_cold: bool = False, cap_bytes: int | None = None) -> Usage:
    """Measure a child that reads the source, and remove what it wrote."""
    prepare_page_cache(is_cold=is_cold)
    usage = measure(command, WORK / "log", cap_bytes=cap_bytes)
    shutil.rmtree(OUT)
    return usage


def prepare_page_cache(*, is_cold: bool, folder: Path = SOURCE) -> None:
    """Read a checkpoint into the page cache, or let the kernel drop it from there."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


if __name__ == "__main__":
    main()
