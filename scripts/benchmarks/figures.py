"""Compare measurements with targets, print them and save them as JSON; shared by all benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure: a ratio of two runs side by side, or a number of seconds."""

    section: str
    name: str
    median: float
    lowest: float
    highest: float
    unit: str
    """`ratio` or `s`."""
    target: float | None
    """The largest value that is `ok`; None for a figure without a target."""
    numerator: float | None = None
    """Median of the numerator alone: seconds, MB of peak memory, or tokens per second."""
    denominator: float | None = None

    @property
    def verdict(self) -> str:
        """`ok`, `over`, or empty for a figure without a target."""
        if self.target is None:
            return ""
        return "ok" if self.median <= self.target else "over"

    def __str__(self) -> str:
        """Format name, median [lowest-highest], target, verdict and both sides in one line."""
        unit = " s" if self.unit == "s" else ""
        line = (
            f"{self.section:9}{self.name:51}{self.median:5.2f} "
            f"[{self.lowest:.2f}-{self.highest:.2f}]{unit}"
        )
        if self.target is not None:
            line += f"  target {self.target:.2f}  {self.verdict}"
        if self.numerator is not None:
            named = {"memory": "MB", "tokens/s": "tokens/s"}
            sides = next((unit for word, unit in named.items() if word in self.name), "s")
            digits = 0 if sides == "MB" else 1
            line += f"  ({self.numerator:.{digits}f} / {self.denominator:.{digits}f} {sides})"
        return line


def summarize(section: str, name: str, values: Sequence[float], **fields: Any) -> Figure:
    """Build a figure from its value in every round."""
    return Figure(
        section=section,
        name=name,
        median=statistics.median(values),
        lowest=min(values),
        highest=max(values),
        **fields,
    )


def compare(
    section: str,
    name: str,
    upper: Sequence[Any],
    lower: Sequence[Any],
    target: float | None,
    field: str | None = None,
) -> Figure:
    """Divide numbers, or one field of measurements, round by round.

    Other load on the machine then affects both sides alike.
    """
    if field:
        upper, lower = ([getattr(each, field) for each in side] for side in (upper, lower))
    ratios = [a / b for a, b in zip(upper, lower, strict=True)]
    sides = {"numerator": statistics.median(upper), "denominator": statistics.median(lower)}
    return summarize(section, name, ratios, unit="ratio", target=target, **sides)


def take_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield every name once per round; each round begins with the next name."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.append(order.pop(0))


@contextmanager
def work_folder(path: Path) -> Iterator[None]:
    """Make an empty work folder, and remove it unless the benchmark fails."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    yield
    shutil.rmtree(path)


def report(
    figures: Iterable[Figure], path: Path | None, about: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Print each figure once it is measured, and the load average; save all as JSON in `path`."""
    loads = {"load_average_at_start": os.getloadavg()[0]}
    print(f"load average at the start: {loads['load_average_at_start']:.1f}", flush=True)
    shown = []
    for figure in figures:
        print(figure, flush=True)
        shown.append({**asdict(figure), "verdict": figure.verdict})
    loads["load_average_at_end"] = os.getloadavg()[0]
    print(f"load average at the end: {loads['load_average_at_end']:.1f}")
    if path:
        path.write_text(json.dumps({**about, **loads, "figures": shown}, indent=2) + "\n")
