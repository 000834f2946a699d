"""Time several runs side by side; shared by the benchmark's workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Prepare = Callable[[], Callable[[], object]]
"""Gives the run to be timed; what it does before that is not timed."""


def load_batches(tokens: Path, device: str) -> list[torch.Tensor]:
    """Read the benchmark's tokens: int64 [1, L] each."""
    rows = [json.loads(line)["input_ids"] for line in tokens.read_text().splitlines()]
    return [torch.tensor([row], device=device) for row in rows]


def time_rounds(runs: Mapping[str, Prepare], *, rounds: int, device: str) -> dict[str, list[float]]:
    """Time every run once a round, in turn; a first round warms up and does not count.

    Every round begins with another run, so that none is always the first after a pause.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            taken = _time_once(runs[name](), device)
            if index:
                seconds[name].append(taken)
    return seconds


def _time_once(run: Callable[[], object], device: str) -> float:
    _wait_for(device)
    started = time.perf_counter()
    run()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
