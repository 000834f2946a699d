"""What commands give: the base of all results, what several have in common, plans and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from fp8calib.checkpoint.output import format_size
from fp8calib.commands import SCHEMA_VERSION
from fp8calib.errors import cut_list, format_count
from fp8calib.model.geometry import KV_ROLES, Frozen, ModelGeometry, Role, Site
from fp8calib.text import Block, Line, Table, format_gib

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats


class Result(Frozen):
    """What a command gives: `--json` prints it, and the function of Python returns it."""

    @property
    def answer(self) -> str:
        """The result in a sentence; empty if the command only writes files."""
        return ""

    def __repr__(self) -> str:
        known = ((key, value) for key, value in self if value not in ("", None, False))
        plain = [
            f"{key}={value:.5g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in known
            if isinstance(value, str | int | float | Path)
        ]
        shown = [repr(self.answer)] if self.answer else []
        return f"{type(self).__name__}({cut_list([*shown, *plain], 20)})"

    __str__ = __repr__

    @property
    def passed(self) -> bool:
        """Whether no check and no gate failed."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Make the object that `--json` prints."""
        found = self.model_dump(mode="json", by_alias=True)
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **found}

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> Self:
        """Read an object that `to_json` made.

        Raises:
            ValidationError: it is no such object.
        """
        computed = {*cls.model_computed_fields, "schema_version", "passed"}
        return cls.model_validate({k: v for k, v in document.items() if k not in computed})


class RunPlan(Result):
    """What `--dry-run --json` prints: the run that is not started."""

    plan: dict[str, Any]
    text: tuple[str, ...] = Field(default=(), exclude=True)
    """Sentences about the memory and the rows of the text."""

    def describe(self) -> Iterator[Block]:
        """Give the plan as a table, without what the sentences say, and the sentences."""
        rows = [
            [
                key.removesuffix("_bytes").removesuffix("_size").replace("_", " "),
                _format(key, value),
            ]
            for key, value in self.plan.items()
            if value not in (None, []) and not isinstance(value, Mapping) and key != "why"
        ]
        title = "plan (nothing was run or written)"
        yield Table(title=title, columns=["what", "value"], rows=rows)
        yield from map(Line, self.text)


def _format(key: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_gib(value) if key.endswith("_bytes") else f"{value:,}"
    return str(value)


class ErrorResult(Result):
    """The error of a command: what failed and where, and what to do."""

    error: dict[Literal["kind", "message", "hint"], str]

    @property
    def passed(self) -> bool:
        """Nothing passed."""
        return False


# --- what is written -----------------------------------------------------------------------------


_WIDE_DTYPES = {"float32": 4, "float64": 8}
_SHARD = re.compile(r"[^/]*-\d+-of-\d+\.safetensors")


class BeforeAfter(Frozen):
    """Sizes in bytes: before and after a command, or without and with FP8."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{format_size(self.before)} -> {format_size(self.after)}"

    @classmethod
    def of_kv_cache(cls, geometry: ModelGeometry) -> Self:
        """Give the bytes of KV cache per token over all layers and ranks, now and in FP8."""
        elements = geometry.kv_elements_per_token
        width = _WIDE_DTYPES.get(geometry.checkpoint_dtype, 2)
        return cls(before=elements * width, after=elements)

    def describe_kv_cache(self) -> str:
        """Describe the sizes of `of_kv_cache`."""
        return f"KV cache: {self.before:,} bytes per token now, {self.after:,} with FP8"


class WrittenCheck(Frozen):
    """What an engine will do with a written checkpoint."""

    path: str
    """Path of the checkpoint, relative to the output folder; `.` for the folder itself."""
    engine: str
    """Name and release of the engine."""
    verdict: str
    """`ok`, `not ok` or `unknown`."""
    summary: str
    """The verdict with the layers that are served, or with the reason."""
    command: str
    """The command that serves it; empty if it is not ok."""


def describe_checks(checks: Sequence[WrittenCheck]) -> Iterator[str]:
    """Give a line for each checkpoint and engine, with the command that serves it."""
    for each in checks:
        where = "" if each.path == "." else f"{each.path}, "
        command = f":\n    {each.command}" if each.command else ""
        yield f"{where}{each.engine}: {each.summary}{command}"


def describe_written(
    out: Path | None, files: Sequence[str], checks: Sequence[WrittenCheck]
) -> list[Line]:
    """List the files in an output folder, and what engines do with it.

    Each folder and all shards are one entry: `kv-overlay/, 2 shards, stats.safetensors`.
    """
    shards = format_count(sum(map(bool, map(_SHARD.fullmatch, files))), "shard")
    names = (f"{name.split('/')[0]}/" if "/" in name else name for name in files)
    shown = ", ".join(dict.fromkeys(_SHARD.sub(shards, name) for name in names))
    return [Line(f"written to {out}: {shown}"), *map(Line, describe_checks(checks))]


# --- what is measured ----------------------------------------------------------------------------


NUM_QUARTERS = 4
_KV_SITES = tuple(f".{role}" for role in KV_ROLES)


class Saturation(Frozen):
    """Shares of the final amax that were reached at 1/4, 1/2 and 3/4 of the data.

    They show whether more data would still change the scales: those of K and V, or of inputs where
    neither was observed.
    """

    median_share: tuple[float, ...]
    """The median over the sites, at each point."""
    least_share: tuple[float, ...]
    """The smallest share of a site, at each point."""
    slowest_site: str
    """The site with the smallest share at 1/2 of the data."""

    def describe(self) -> str:
        """Describe the shares at half of the data in one line."""
        median, least = (int(100 * share[1]) for share in (self.median_share, self.least_share))
        counted = "K and V" if self.slowest_site.endswith(_KV_SITES) else "inputs"
        return (
            f"half of the text gave {median}% of the final amax of {counted} in the median, and "
            f"{least}% in the slowest tensor ({self.slowest_site})"
        )

    @classmethod
    def of(cls, stats: RunStats) -> Self | None:
        """Compare running amax of K and V, or of inputs, with the final one; None for a shard."""
        import numpy as np

        shares: dict[Site, list[float]] = {}
        for site, seen in stats.sites.items() if stats.shard is None else ():
            amax = None if seen.progress is None else np.asarray(seen.progress, dtype=np.float64)
            if seen.sequences is not None and len(seen.sequences):  # 0 where there are too few
                quarter = np.arange(len(seen.sequences)) * NUM_QUARTERS // len(seen.sequences)
                amax = np.zeros(NUM_QUARTERS)
                np.maximum.at(amax, quarter, np.asarray(seen.sequences))
            if site.role is not Role.WEIGHT and amax is not None and amax.max() > 0:
                running = np.maximum.accumulate(amax)
                shares[site] = (running[:-1] / running[-1]).tolist()
        if not shares:
            return None
        shares = {site: each for site, each in shares.items() if site.role in KV_ROLES} or shares
        points = list(zip(*shares.values(), strict=True))
        return cls(
            median_share=tuple(map(median, points)),
            least_share=tuple(map(min, points)),
            slowest_site=str(min(shares, key=lambda site: shares[site][1])),
        )
