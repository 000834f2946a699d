"""Time a calibration inside vLLM against fp8calib's own, whole commands, and measure the memory.

Started by `scripts/bench --engine`, after `scripts/test-engines` has made `.venv-vllm`. Both
calibrate the same tokens in one process with one thread; the engine's worker is a process of vLLM.
"""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

from scripts.benchmarks.child_process import PYTHON, measure, run_arguments, write_tokens
from scripts.benchmarks.figures import Figure, compare, report, take_turns, work_folder
from scripts.benchmarks.options import make_parser

WORK = Path("build/bench-engine")
TOKENS = WORK / "tokens.jsonl"
ENGINE_PYTHON = ".venv-vllm/bin/python"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
_SAMPLE_S = 0.1


def main() -> None:
    """Measure, and print the figures."""
    parser = make_parser("--engine", __doc__, rounds=5, samples=32, dtypes=("float32", "bfloat16"))
    options = parser.parse_args()
    os.environ |= {**ENVIRONMENT, "PYTHONPATH": str(Path.cwd())}
    with work_folder(WORK):
        report(measure_both(options), options.json)


def measure_both(options: Namespace) -> Iterator[Figure]:
    """Run both in turn."""
    write_tokens(options, TOKENS)
    seconds: dict[str, list[float]] = {"own": [], "engine": []}
    memory: dict[str, list[float]] = defaultdict(list)
    for name in take_turns(seconds, options.rounds):
        peaks: dict[str, int] = defaultdict(int)
        ended = threading.Event()
        sampler = threading.Thread(target=sample, args=(ended, peaks))
        sampler.start()
        seconds[name].append(run(name, options))
        ended.set()
        sampler.join()
        for process, peak in peaks.items():
            memory[f"{name}: {process}"].append(peak / 1e6)
    yield compare(options.dtype, "command, engine / own", seconds["engine"], seconds["own"], None)
    own = memory.pop("own: driver")
    for process, peaks_mb in memory.items():
        yield compare(options.dtype, f"peak memory, {process} / own", peaks_mb, own, None)


def run(name: str, options: Namespace) -> float:
    """Calibrate on one side; return the seconds of the whole command."""
    python, more = (PYTHON, []) if name == "own" else (ENGINE_PYTHON, ["--engine", "vllm"])
    arguments = [*run_arguments(options, TOKENS, options.dtype), "--force", *more]
    command = [python, "-m", "fp8calib", "calibrate", options.model, *arguments]
    return measure([*command, "--out", str(WORK / name)], WORK / f"{name}.log").duration_s


def sample(ended: threading.Event, peaks: dict[str, int]) -> None:
    """Keep the largest resident memory of the command and of vLLM's processes."""
    while not ended.wait(_SAMPLE_S):
        for process in psutil.Process().children(recursive=True):
            try:
                title, peak = process.cmdline()[0], process.memory_info().rss
                is_driver = process.ppid() == os.getpid()
            except (psutil.Error, IndexError):
                continue
            if is_driver or title.startswith("VLLM::"):
                kind = "driver" if is_driver else "worker"
                peaks[kind] = max(peaks[kind], peak)


if __name__ == "__main__":
    main()
