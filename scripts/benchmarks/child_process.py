"""Start the child processes of a benchmark, and measure their time and memory.

Imports no torch: the kernel counts a child's peak memory from that of its parent.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

PYTHON = sys.executable
PROGRAM = str(Path(sys.executable).with_name("fp8calib"))
_SAMPLE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The time and the memory that one child used."""

    duration_s: float
    cpu_s: float
    """Of all its threads."""
    peak_resident_mb: float
    """As the kernel counts it (`ru_maxrss`), mapped files included."""
    peak_anonymous_mb: float
    """Of anonymous memory, sampled every 20 ms."""


def call(
    *command: object, env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> str:
    """Run a child to its end and return its stdout; if it fails, exit with its stderr."""
    parts = [str(part) for part in command]
    done = subprocess.run(  # noqa: S603
        parts, env=env, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    if done.returncode:
        _exit(done.stderr, parts)
    return done.stdout


def read_json(*command: object) -> dict[str, Any]:
    """Run a child and read the JSON object in its last line of stdout."""
    found: dict[str, Any] = json.loads(call(*command).splitlines()[-1])
    return found


def measure(command: Sequence[str], log: Path, *, cap_bytes: int | None = None) -> Usage:
    """Run a child to its end and measure it; if it fails, exit with its stderr.

    Args:
        command: the command line.
        log: receives the child's stderr.
        cap_bytes: limit of the child's writable private memory, enforced by the kernel.
    """
    os.sync()  # what the previous child wrote must not slow this one down
    samples = [0]
    with log.open("wb") as file:
        started = time.perf_counter()
        child = subprocess.Popen(  # noqa: S603
            command,
            stdout=subprocess.DEVNULL,
            stderr=file,
            preexec_fn=partial(_limit_data, cap_bytes) if cap_bytes else None,  # noqa: PLW1509
        )
        sampler = threading.Thread(target=_sample_anonymous_bytes, args=(child.pid, samples))
        sampler.start()
        _, status, usage = os.wait4(child.pid, 0)
        duration_s = time.perf_counter() - started
    sampler.join()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        _exit(log.read_text(errors="replace"), command)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Usage(
        duration_s=duration_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_resident_mb=usage.ru_maxrss * unit / 1e6,
        peak_anonymous_mb=max(samples) / 1e6,
    )


def _limit_data(cap_bytes: int) -> None:
    """Limit this process's writable private memory; the kernel enforces it."""
    resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, cap_bytes))


def _sample_anonymous_bytes(pid: int, samples: list[int]) -> None:
    """Append the anonymous memory of a process every 20 ms until it has ended."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        samples += [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
        time.sleep(_SAMPLE_S)


def _exit(stderr: str, command: Sequence[str]) -> NoReturn:
    sys.exit(f"{stderr}\nfailed: {' '.join(command)}")


# --- command lines -----------------------------------------------------------------------------


def worker(module: str, *arguments: object, python: str = PYTHON) -> list[str]:
    """Build the command line of a module of `scripts/benchmarks`."""
    return [python, "-m", f"scripts.benchmarks.{module}", *map(str, arguments)]


def run_arguments(options: Namespace, tokens: Path, dtype: str) -> list[str]:
    """Build the arguments that `calibrate` and `verify` share: text, its size and the dtype."""
    size = ["--samples", str(options.samples), "--seq-len", str(options.seq_len)]
    return ["--data", str(tokens), *size, "--dtype", dtype]


def write_tokens(
    options: Namespace, path: Path, part: str = "calibrate", text: Path | None = None
) -> dict[str, Any]:
    """Write the token ids that every side reads; return the facts about this machine.

    They are those of a file, or of a part of the built-in text.
    """
    size = (options.samples, options.seq_len)
    specs = [] if text is None else [text]
    return read_json(*worker("workers.tokens", options.model, path, *size, part, *specs))
