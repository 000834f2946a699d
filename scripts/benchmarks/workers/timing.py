"""Time several runs side by side; shared by the workers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

import torch

from scripts.benchmarks.figures import take_turns

Prepare = Callable[[], Callable[[], object]]
"""Returns the run to be timed; its own work is not timed."""


def load_batches(tokens: Path, device: str, size: int = 1) -> list[torch.Tensor]:
    """Read the benchmark's tokens, an int64 [size, L] tensor for `size` sequences."""
    rows = [json.loads(line)["input_ids"] for line in tokens.read_text().splitlines()]
    starts = range(0, len(rows), size)
    return [torch.tensor(rows[start : start + size], device=device) for start in starts]


@torch.no_grad()
def run_plain(model: torch.nn.Module, batches: list[torch.Tensor]) -> None:
    """Run the plain forward pass over every batch."""
    for ids in batches:
        model(ids)


def print_seconds(runs: Mapping[str, Prepare], *, rounds: int, device: str) -> None:
    """Time every run once per round and print {name: [seconds]}; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with redirect_stdout(sys.stderr):
        for name in take_turns(runs, rounds + 1):
            seconds[name].append(_time_once(runs[name](), device))
    print(json.dumps({name: values[1:] for name, values in seconds.items()}))


def _time_once(run: Callable[[], object], device: str) -> float:
    _synchronize(device)
    started = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
