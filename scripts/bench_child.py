"""Run a child of a benchmark, and watch its memory.

Imports no torch: a child's memory, as the kernel counts it, begins at its parent's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What one run of a child took."""

    duration_s: float
    peak_bytes: int
    """Of anonymous memory in use, looked at every 20 ms."""


def watch(command: Sequence[str], log: Path, *, cap: Callable[[], None] | None = None) -> Watched:
    """Run a child to its end and watch its memory; where it fails, end with what it said.

    Args:
        command: what to run.
        log: takes what it says on stderr.
        cap: is called in the child, before the command.
    """
    os.sync()  # nobody waits for what the one before has still to write
    with log.open("wb") as file:
        started = time.perf_counter()
        child = subprocess.Popen(  # noqa: S603
            command,
            stdout=subprocess.DEVNULL,
            stderr=file,
            preexec_fn=cap,  # noqa: PLW1509
        )
        peak_bytes = 0
        while child.poll() is None:
            peak_bytes = max(peak_bytes, _read_anonymous_bytes(child.pid))
            time.sleep(0.02)
        duration_s = time.perf_counter() - started
    if child.returncode:
        sys.exit(f"{log.read_text(errors='replace')}\nfailed: {' '.join(command)}")
    return Watched(duration_s=duration_s, peak_bytes=peak_bytes)


def _read_anonymous_bytes(pid: int) -> int:
    """Read how much anonymous memory a process has in use; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
    return found * 1024
